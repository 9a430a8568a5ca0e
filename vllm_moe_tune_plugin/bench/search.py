"""The search behind ``vllm-moe-tune tune``: tiles of the decode kernels for one layer, and how many tokens they win with.

Tiles are found by climbing: from those of the formula to a neighbour that is faster, until none is or the time is over. What
is found must beat the formula, which has tiles for each number of tokens, in the mean over a few of them. The
kernels run alone there, over layers with distinct weights as in ``bench layer``. The window is measured against stock in
vLLM's whole layer, by ``bench layer`` itself.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin import gpu, tuned_tiles
from vllm_moe_tune_plugin.bench import experts, layer, stats
from vllm_moe_tune_plugin.bench.layer import Arm, Job, Machine, Program
from vllm_moe_tune_plugin.bench.schema import BenchError
from vllm_moe_tune_plugin.bench.shapes import BLOCK, Shape, draw_routing
from vllm_moe_tune_plugin.kernels import scales
from vllm_moe_tune_plugin.tuned_tiles import LIMITS, MOST_TOKENS, Entry

#: A neighbour must be this much faster: less is noise.
GAIN = 0.99

#: Parameters that move together, by factors of two.
MOVES = (
    ("up_rows",),
    ("up_columns", "up_warps"),
    ("up_columns",),
    ("up_warps",),
    ("down_rows",),
    ("down_columns", "down_warps"),
    ("down_columns",),
    ("down_warps",),
    ("down_ahead",),
)

#: Of tiles, or of the formula's for each number of tokens.
Measure = Callable[[dict[str, int] | None], float]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        seconds: time for the tiles; the window takes a few more.
        compared: tokens with which tiles are compared.
        window: tokens with which the window is looked for.
        samples: of each of the former.
    """

    seconds: float
    compared: Sequence[int] = (1, 4)
    window: Sequence[int] = (1, 2, 4, 8, MOST_TOKENS)
    samples: int = 9

    @classmethod
    def interpreted(cls, seconds: float) -> Plan:
        """As little as takes the whole path."""
        return cls(seconds, compared=(1,), window=(1, 2), samples=1)


def neighbours(tiles: dict[str, int], vector: int) -> Iterator[dict[str, int]]:
    """Tiles that differ by one move and stay within the limits.

    Args:
        vector: weights that a thread loads at once; a tile does not get narrower than half a warp's loads.
    """
    for names in MOVES:
        for double in (True, False):
            moved = dict(tiles)
            for name in names:
                moved[name] = moved[name] * 2 if double else moved[name] // 2
            if all(0 < moved[name] <= LIMITS[name] for name in names) and all(
                moved[f"{side}_columns"] >= min(tiles[f"{side}_columns"], 16 * vector) for side in ("up", "down")
            ):
                yield moved


def climb(measure: Measure, start: dict[str, int], vector: int, seconds: float) -> tuple[dict[str, int] | None, float, int]:
    """The best tiles, None where they are the formula's, how many times as fast as those, and how many were tried.

    Args:
        start: the formula's for some number of tokens.
    """
    deadline = time.monotonic() + seconds
    first = shortest = measure(None)
    best: dict[str, int] | None = None
    tried: set[tuple[tuple[str, int], ...]] = set()
    moved = True
    while moved:
        moved = False
        for candidate in itertools.chain([start], neighbours(best or start, vector)):
            if time.monotonic() >= deadline:
                break
            if tuple(candidate.items()) in tried:
                continue
            tried.add(tuple(candidate.items()))
            took = measure(candidate)
            if took < GAIN * shortest:
                best, shortest, moved = candidate, took, True
                break
    return best, first / shortest if best else 1.0, len(tried)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        entry: what engines will use.
        tried: how many tiles were measured.
        speed_up: time with the formula's tiles over time with the best, kernels alone.
        rows: of ``bench layer``, one for each number of tokens of the plan's window.
    """

    entry: Entry
    tried: int
    speed_up: float
    rows: Sequence[dict[str, Any]]


def search(shape: Shape, dtype: str, ep: int, machine: Machine, plan: Plan, say: Callable[[str], None]) -> Found:
    """Search for one layer.

    Raises:
        BenchError: the layer cannot be had, or its output was wrong.
    """
    import torch

    problem = shape.refusal(dtype, ep)
    if problem:
        raise BenchError(f"{shape.name} in {dtype}: {problem}")
    layers: list[experts.Layer] = []
    with torch.inference_mode(), layer.vllm_config():
        made = layer.guarded(layer.make_layers, layers, shape, dtype, ep, machine)
        if made["status"] != "ok":
            raise BenchError(f"{shape.name} in {dtype}: {made['reason']}")
        measure = kernels_alone(layers, dtype, machine, plan, say)
        vector = 16 // layers[0].weights.w1.element_size()
        best, speed_up, tried = climb(measure, formula(layers, plan.compared[-1]), vector, plan.seconds)

        rows = []
        with tuned_tiles.trial(Entry(MOST_TOKENS, best)):
            job = Job((shape,), (dtype,), plan.window, ("uniform",), (ep,))
            bandwidth = machine.copy_bandwidth()
            for key in job.row_keys():
                row = {"key": key, **layer.guarded(layer.measure, job, machine, layers, key, bandwidth)}
                if row["status"] != "ok":
                    raise BenchError(f"{key['tokens']} tokens: {row['reason']}")
                rows.append(row)
                say(f"{key['tokens']} tokens: {row['ratio']:.3f} times as fast as stock")
        vllm_moe_tune_plugin.unregister()
    return Found(Entry(window(rows), best), tried, speed_up, rows)


def window(rows: Sequence[dict[str, Any]]) -> int:
    """The most tokens up to which every row won, by more than its noise: the whole 95 % interval lies above 1."""
    tokens = 0
    for row in rows:
        if row["ratio_ci95"][0] <= 1.0:
            break
        tokens = row["key"]["tokens"]
    return tokens


def formula(layers: Sequence[experts.Layer], tokens: int) -> dict[str, int]:
    """The tiles that the kernels take for that many tokens where nothing was searched."""
    from vllm_moe_tune_plugin.kernels.decode_moe import expected_pairs, tiles_of

    weights, top_k = layers[0].weights, layers[0].shape.top_k
    expected = expected_pairs(weights.w1, layers[0].expert_map, tokens * top_k)
    return dataclasses.asdict(tiles_of(weights.w1, weights.w2, tokens, top_k, expected))


def kernels_alone(
    layers: Sequence[experts.Layer], dtype: str, machine: Machine, plan: Plan, say: Callable[[str], None]
) -> Measure:
    """The mean time of both kernels over the compared tokens, in microseconds; infinite for tiles that do not compile."""
    import torch

    from vllm_moe_tune_plugin.kernels.decode_moe import Tiles, decode_moe
    from vllm_moe_tune_plugin.tunings.decode_kernel import ACTIVATIONS, SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT

    shape, device, calls = layers[0].shape, machine.device, layer.calls_of(len(layers), machine, 1)
    block = (BLOCK, BLOCK) if dtype == "fp8-block" else None
    inputs = []
    for tokens in plan.compared:
        ids, weights = draw_routing(shape, "uniform", calls, tokens, device)
        x = torch.randn(calls, tokens, shape.hidden, dtype=experts.torch_dtype(dtype), device=device)
        x_scale = None
        if dtype.startswith("fp8"):
            x = (100 * x).clamp(-448, 448).to(torch.float8_e4m3fn)
            groups = -(-shape.hidden // BLOCK) if block else 1
            values = (torch.rand(tokens if block else 1, groups, device=device) + 0.5) / 100
            x_scale = scales.of_input(values, tokens, shape.hidden, block)
        out = torch.empty(calls, tokens, shape.hidden, dtype=experts.torch_dtype(dtype), device=device)
        scratch = torch.empty(tokens * shape.top_k * shape.intermediate, dtype=out.dtype, device=device)
        inputs.append((x, x_scale, ids, weights, out, scratch))
    activation, interleaved = ACTIVATIONS[shape.activation]
    pdl = gpu.has_pdl(device)

    def run(given: Sequence[Any], tiles: Any) -> list[Any]:
        x, x_scale, ids, weights, out, scratch = given
        for call in range(calls):
            held = layers[call % len(layers)]
            own = held.weights
            decode_moe(
                out[call],
                x[call],
                own.w1,
                own.w2,
                None if shape.router_weight_on_input else weights[call],
                ids[call],
                scratch,
                activation=activation,
                expert_map=held.expert_map,
                x_scale=x_scale,
                w1_scale=scales.of_weight(own.w1_scale, own.w1, block),
                w2_scale=scales.of_weight(own.w2_scale, own.w2, block),
                w1_bias=own.b1,
                w2_bias=own.b2,
                interleaved=interleaved,
                alpha=SWIGLUOAI_ALPHA,
                limit=SWIGLUOAI_LIMIT,
                pdl=pdl,
                tiles=tiles,
            )
        return list(out)

    def measure(tiles: dict[str, int] | None) -> float:
        total = 0.0
        for given in inputs:
            program = Program(Arm("trial", lambda: None))
            try:
                machine.prepare(program, functools.partial(run, given, tiles and Tiles(**tiles)))
                total += stats.median(machine.time([program] * plan.samples)) / calls
            except Exception as error:  # too many registers, a tile that Triton cannot cut: not these, then
                if machine.device.type == "cuda":
                    torch.cuda.synchronize()  # raises where the GPU itself is lost
                say(f"{_short(tiles)}: {type(error).__name__}")
                return math.inf
        say(f"{_short(tiles)}: {total / len(inputs):.2f} us")
        return total / len(inputs)

    return measure


def _short(tiles: dict[str, int] | None) -> str:
    if tiles is None:
        return "by formula"
    return " ".join(f"{name} {value}" for name, value in tiles.items())
