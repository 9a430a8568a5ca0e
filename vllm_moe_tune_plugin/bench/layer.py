"""``bench layer``: one MoE layer, stock and tuned, by replay of CUDA graphs.

For each row both arms are captured from the same layers, with weights of their own for each layer, so many that a replay
reads several times what the L2 cache holds. The routing is an input of the graphs: each round draws a new one, the same for
both arms, and replays them in the order A B B A (the next round B A A B). A sample is the time of one replay divided by the
calls in it. The GPU is kept busy while a round's replays are queued, so that no launch shows in a sample.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import pathlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin.bench import experts, stats
from vllm_moe_tune_plugin.bench.schema import BenchError, Results
from vllm_moe_tune_plugin.bench.shapes import ZIPF, Shape, draw_routing

MIN_LAYERS, MAX_LAYERS = 8, 16
#: Layers are added until one token's experts are this many times the L2 cache.
CACHES = 4
#: A graph of tiny batches goes over its layers until it holds this many calls: what a replay costs itself gets small.
MIN_CALLS, FEW_TOKENS = 16, 16
#: Rounds of a row in one place: as many as fit its time, within these. Two samples of each arm a round.
MIN_ROUNDS, MAX_ROUNDS = 6, 40
#: Where a layer's scratch lies changes its time for as long as it lies there (by up to 11 %): a row is measured with scratch
#: in several places, one after the other.
PLACEMENTS = 4
#: Above this relative error an output is wrong. fp8 with quantised activations stays below 0.06, but for the one or two rows
#: of a tiny shape, which scatter to 0.12; one expert of ten left out is 0.3.
MAX_ERROR = 0.2

METHOD = {
    "what": "vLLM's modular kernel (no EP dispatch) with TritonExperts, from the router's output to the layer's, "
    "quantisation of the input included",
    "order": "A B B A, then B A A B; one new routing a round, the same for both",
    "placements": f"scratch, input and graphs are allocated anew {PLACEMENTS} times a row, in other places",
    "sample": "microseconds a layer: one CUDA-graph replay divided by its calls",
    "median_us": "median of all samples; spread_us: their median absolute deviation",
    "ratio": "stock over tuned time, above 1: tuned is faster; median over rounds of the ratio inside a round, "
    "with a 95 % bootstrap interval",
    "limit_us": "(weights of the distinct experts + input + output + routing) / bandwidth of a large copy in this run, half of "
    "whose bytes are written: reading alone can be a little faster, so that a row may lie below it",
    "relative_error": "norm of the difference over norm of the float64 reference with dequantised weights and the "
    "unquantised input, after poisoning outputs and workspaces with NaN",
    "skewed": f"popularity of a layer's experts by Zipf's law with exponent {ZIPF:g}",
}


@dataclass(frozen=True)
class Arm:
    """One way to run the layer: stock, or with the plugin registered. ``enter`` puts the process into that state."""

    name: str
    enter: Callable[[], None]


STOCK = Arm("stock", vllm_moe_tune_plugin.unregister)
TUNED = Arm("tuned", vllm_moe_tune_plugin.register)
#: Stock once more: its ratio shows what the method cannot tell apart.
CONTROL = Arm("control", vllm_moe_tune_plugin.unregister)


@dataclass(frozen=True)
class Job:
    """What to measure. ``seconds`` is the time for one row's samples."""

    shapes: Sequence[Shape]
    dtypes: Sequence[str]
    tokens: Sequence[int]
    routings: Sequence[str]
    ep_sizes: Sequence[int]
    seconds: float = 0.25
    # Stock arms first: a tuned graph may hold tensors of the session that made it, which must live while it is replayed.
    arms: Sequence[Arm] = (STOCK, TUNED)

    def row_keys(self) -> Iterator[dict[str, Any]]:
        """A row's key for each combination, those that share weights together."""
        for shape in self.shapes:
            for dtype in self.dtypes:
                for ep in self.ep_sizes:
                    for routing in self.routings:
                        for tokens in self.tokens:
                            yield {"shape": shape.name, "dtype": dtype, "ep": ep, "routing": routing, "tokens": tokens}


@dataclass
class Program:
    """One arm's calls of all layers, ready to run.

    Attributes:
        outputs: those of its last run, one for each call.
        scratch: the workspaces that it writes to, kept alive for it.
    """

    arm: Arm
    outputs: list[Any] = field(default_factory=list)
    scratch: list[Any] = field(default_factory=list)
    run: Callable[[], None] = lambda: None


class Machine(Protocol):
    """Where the layers run."""

    device: Any
    cache_bytes: int
    min_layers: int
    min_rounds: int
    placements: int

    def free_bytes(self) -> int: ...

    def prepare(self, program: Program, body: Callable[[], list[Any]]) -> None:
        """Make ``program.run`` run ``body`` in the arm's state, with everything compiled."""

    def time(self, order: Sequence[Program]) -> list[float]:
        """Microseconds of each program's run, one after the other."""

    def run_poisoned(self, program: Program) -> None:
        """Run once, with outputs and workspaces full of NaN before."""

    def copy_bandwidth(self) -> float:
        """Bytes a second of a large copy, read and written ones counted."""


class Gpu:
    """CUDA graphs on the first GPU."""

    min_layers, min_rounds, placements = MIN_LAYERS, MIN_ROUNDS, PLACEMENTS

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cuda", torch.cuda.current_device())
        self.cache_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size

    def free_bytes(self) -> int:
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def prepare(self, program: Program, body: Callable[[], list[Any]]) -> None:
        import torch

        program.arm.enter()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            program.outputs = body()
        program.scratch = experts.workspaces()
        program.run = graph.replay
        graph.replay()

    def time(self, order: Sequence[Program]) -> list[float]:
        import torch

        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]
        order[0].run()  # not timed: keeps the GPU busy while the rest is queued
        events[0].record()
        for program, event in zip(order, events[1:], strict=True):
            program.run()
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in itertools.pairwise(events)]

    def run_poisoned(self, program: Program) -> None:
        import torch

        for output in program.outputs:
            output.fill_(float("nan"))
        _poison(program.scratch)
        program.run()
        torch.cuda.synchronize()

    def copy_bandwidth(self) -> float:
        import torch

        size = min(1 << 30, self.free_bytes() // 4)
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        times = []
        for _ in range(25):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return 2 * size / stats.median(times[5:])


class Interpreter:
    """Triton's interpreter on the CPU: the same path without graphs. Its times say nothing about a GPU."""

    cache_bytes = 0
    min_layers, min_rounds, placements = 2, 1, 1

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cpu")
        accelerator: Any = torch.accelerator
        accelerator.empty_cache = lambda: None  # vLLM's workspaces call it when they grow

    def free_bytes(self) -> int:
        return 1 << 30

    def prepare(self, program: Program, body: Callable[[], list[Any]]) -> None:
        def run() -> None:
            program.outputs = body()

        program.run = run
        program.arm.enter()
        program.run()

    def time(self, order: Sequence[Program]) -> list[float]:
        times = []
        for program in order:
            program.arm.enter()
            start = time.perf_counter()
            program.run()
            times.append((time.perf_counter() - start) * 1e6)
        return times

    def run_poisoned(self, program: Program) -> None:
        import torch

        program.arm.enter()
        _poison(experts.workspaces())
        # Under this mode torch fills what it allocates with NaN.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            program.run()
        finally:
            torch.use_deterministic_algorithms(False)

    def copy_bandwidth(self) -> float:
        import torch

        source = torch.rand(1 << 20)
        target = torch.empty_like(source)
        start = time.perf_counter()
        target.copy_(source)
        return float(2 * source.nbytes / (time.perf_counter() - start))


def _poison(buffers: Sequence[Any]) -> None:
    """Make every byte part of a NaN, in all types that experts take scratch in."""
    for buffer in buffers:
        buffer.fill_(0xFF)


def start(interpret: bool) -> Machine:
    """Import vLLM and make this process ready for layers.

    Raises:
        BenchError: there is no GPU, or no vLLM.
    """
    from vllm_moe_tune_plugin.stack import exists

    if not exists("vllm"):
        raise BenchError("vLLM is not installed here: run this in vLLM's environment")
    if interpret:
        from vllm_moe_tune_plugin import no_gpu

        no_gpu.prepare()
        no_gpu.stand_in_platform((9, 0))
        experts.import_vllm()
        no_gpu.activate()
        machine: Machine = Interpreter()
    else:
        import torch

        if not torch.cuda.is_available():
            raise BenchError("no GPU is visible to torch: run this on one, or try the path with --interpret")
        experts.import_vllm()
        machine = Gpu()
    experts.renew_workspaces(machine.device)
    return machine


def run(job: Job, machine: Machine, results: Results, progress: Callable[[dict[str, Any]], None]) -> None:
    """Measure all rows that ``results`` lacks; each is saved when it is done, whatever became of it.

    Raises:
        BenchError: the GPU is lost for this process. The rows until then are saved.
    """
    import torch

    shapes = {shape.name: shape for shape in job.shapes}
    with torch.inference_mode(), vllm_config():
        if "bandwidth" not in results.data:
            results.data["bandwidth"] = machine.copy_bandwidth()
        for part in _by_weights(key for key in job.row_keys() if not results.has(key)):
            shape, dtype, ep = shapes[part[0]["shape"]], part[0]["dtype"], part[0]["ep"]
            problem = shape.refusal(dtype, ep)
            layers: list[experts.Layer] = []
            if problem:
                outcome = {"status": "unsupported", "reason": problem}
            else:
                outcome = guarded(make_layers, layers, shape, dtype, ep, machine)
            for key in part:
                row = {"key": key, "problem": _problem(shape), **outcome}
                if outcome["status"] == "ok":
                    row |= guarded(measure, job, machine, layers, key, results.data["bandwidth"])
                results.add(row)
                progress(row)
                _check_alive(machine)
            layers.clear()
            machine.free_bytes()
    vllm_moe_tune_plugin.unregister()


@contextlib.contextmanager
def vllm_config() -> Iterator[None]:
    """An engine's configuration: custom ops and experts ask for it when they are built."""
    import importlib

    config = importlib.import_module("vllm.config")
    with config.set_current_vllm_config(config.VllmConfig()):
        yield


def _by_weights(keys: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for key in keys:
        groups.setdefault((key["shape"], key["dtype"], key["ep"]), []).append(key)
    yield from groups.values()


def _problem(shape: Shape) -> dict[str, Any]:
    return {
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "intermediate": shape.intermediate,
        "hidden": shape.hidden,
        "activation": shape.activation,
    }


def guarded(step: Callable[..., Mapping[str, Any] | None], *arguments: Any) -> dict[str, Any]:
    """A step's result, or why there is none."""
    import torch

    try:
        return {"status": "ok", **(step(*arguments) or {})}
    except torch.cuda.OutOfMemoryError:
        return {"status": "oom", "reason": "out of GPU memory"}
    except experts.Unsupported as error:
        return {"status": "unsupported", "reason": str(error)}
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        *_, frame = traceback.extract_tb(error.__traceback__)
        where = f"{pathlib.PurePath(frame.filename).name}:{frame.lineno}"
        return {"status": "failed", "reason": f"{type(error).__name__}: {first_line} ({where})"}


def _check_alive(machine: Machine) -> None:
    import torch

    if machine.device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise BenchError(f"the GPU is lost for this process, run again to go on: {str(error).splitlines()[0]}") from error


def make_layers(layers: list[experts.Layer], shape: Shape, dtype: str, ep: int, machine: Machine) -> None:
    import torch

    expert = shape.expert_bytes(dtype)
    wanted = -(-CACHES * machine.cache_bytes // (shape.top_k * expert))
    possible = int(0.8 * machine.free_bytes()) // (shape.num_experts * expert)
    count = min(max(wanted, machine.min_layers), MAX_LAYERS, possible)
    if count < 2:
        raise torch.cuda.OutOfMemoryError
    for _ in range(count):
        layers.append(experts.Layer(shape, dtype, experts.Weights.random(shape, dtype, machine.device), ep, machine.device))


def calls_of(layers: int, machine: Machine, tokens: int) -> int:
    """How many calls a program makes: each layer one, or several where a graph would be short."""
    graphs = machine.device.type == "cuda"
    return layers * (-(-MIN_CALLS // layers) if graphs and tokens <= FEW_TOKENS else 1)


def time_round(machine: Machine, programs: Sequence[Program], number: int) -> Iterator[tuple[Program, float]]:
    """One round, A B B A, or B A A B where its number is odd: each run's program and its microseconds."""
    turn = list(programs if number % 2 == 0 else programs[::-1])
    order = [*turn, *turn[::-1]]
    return zip(order, machine.time(order), strict=True)


def measure(
    job: Job, machine: Machine, layers: Sequence[experts.Layer], key: Mapping[str, Any], bandwidth: float
) -> dict[str, Any]:
    """One row."""
    import torch

    shape, tokens, dtype, device = layers[0].shape, key["tokens"], key["dtype"], machine.device
    calls = calls_of(len(layers), machine, tokens)
    ids, weights = draw_routing(shape, key["routing"], calls, tokens, device)
    hidden_states = torch.randn(calls, tokens, shape.hidden, dtype=experts.torch_dtype(dtype), device=device)

    def body() -> list[Any]:
        return [layers[call % len(layers)](hidden_states[call], weights[call], ids[call]) for call in range(calls)]

    tunings: dict[str, dict[str, Any]] = {}
    samples: dict[str, list[float]] = {arm.name: [] for arm in job.arms}
    distinct = torch.zeros((), dtype=torch.int64, device=device)
    local = len(layers[0].weights.w1)
    rounds = 0
    earlier: list[Any] = []  # what was allocated before, kept so that the next placement is another one
    for placement in range(1, machine.placements + 1):
        hidden_states = hidden_states.clone()
        experts.renew_workspaces(device)
        programs = [Program(arm) for arm in job.arms]
        for program in programs:
            machine.prepare(program, body)
            if program.arm is TUNED:
                tunings = _tunings()
        earlier += [hidden_states, programs]
        enough = machine.min_rounds * placement
        deadline = time.perf_counter() + job.seconds / machine.placements
        while rounds < enough or (rounds < MAX_ROUNDS * placement and time.perf_counter() < deadline):
            fresh_ids, fresh_weights = draw_routing(shape, key["routing"], calls, tokens, device)
            ids.copy_(fresh_ids)
            weights.copy_(fresh_weights)
            hit = torch.zeros(calls, shape.num_experts, dtype=torch.bool, device=device)
            distinct += hit.scatter_(1, ids.flatten(1).long(), True)[:, :local].sum()
            for program, sample in time_round(machine, programs, rounds):
                samples[program.arm.name].append(round(sample / calls, 3))
            rounds += 1

    checked = sorted({0, calls - 1})
    references = [layers[call % len(layers)].reference(hidden_states[call], weights[call], ids[call]) for call in checked]
    errors: dict[str, float | None] = {}
    for program in programs:
        machine.run_poisoned(program)
        error = max(
            _relative_error(program.outputs[call], reference) for call, reference in zip(checked, references, strict=True)
        )
        errors[program.arm.name] = error if math.isfinite(error) else None

    experts_hit = distinct.item() / (rounds * calls)
    moved = experts_hit * shape.expert_bytes(dtype) + shape.activation_bytes(tokens)
    row = {
        "layers": len(layers),
        "calls": calls,
        "samples_us": samples,
        "median_us": {name: round(stats.median(own), 3) for name, own in samples.items()},
        "spread_us": {name: round(stats.spread(own), 3) for name, own in samples.items()},
        "distinct_experts": round(experts_hit, 2),
        "bytes": int(moved),
        "limit_us": round(moved / bandwidth * 1e6, 3),
        "relative_error": errors,
        "tunings": tunings,
    }
    for arm in job.arms:
        if arm is not STOCK:
            ratios = stats.paired_ratios(samples[STOCK.name], samples[arm.name], 2)
            name = "ratio" if arm is TUNED else f"ratio_{arm.name}"
            row[name] = round(stats.median(ratios), 4)
            row[f"{name}_ci95"] = [round(bound, 4) for bound in stats.confidence(ratios)]
    wrong = [name for name, error in errors.items() if error is None or error > MAX_ERROR]
    if wrong:
        row |= {"status": "failed", "reason": f"wrong output of {', '.join(wrong)}"}
    return row


def _relative_error(output: Any, reference: Any) -> float:
    """Infinite where an output was not written. Without a local expert the reference is zero, and the error absolute."""
    import torch

    size = torch.linalg.vector_norm(reference).item()
    error = torch.linalg.vector_norm(output.double() - reference).item() / (size or 1.0)
    return float(f"{error:.3g}") if math.isfinite(error) else math.inf


def _tunings() -> dict[str, dict[str, Any]]:
    """Each tuning's state, and how many calls its patches changed while the tuned arm was prepared."""
    return {tuning["name"]: {"state": tuning["state"], "tuned": tuning["tuned"]} for tuning in vllm_moe_tune_plugin.status()}
