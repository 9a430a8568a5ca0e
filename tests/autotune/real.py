"""What warm-up really tunes and what serving really finds, on a machine without a GPU.

Stock vLLM's own `flashinfer_autotune` runs FlashInfer's own autotuner over every place where the installed vLLM calls a
FlashInfer MoE kernel; only the measuring of a tactic is left out, and the tensors made for it. Then FlashInfer's own cache is
asked for batches of 1 to `dp * max_num_batched_tokens` tokens, with the tuning configuration and tensor shapes of a call made
as in serving.

As a program, in the environment of one release:
    python real.py OUTPUT [--configurations 1x2048,4x8192]    the table, all of it by default; minutes
    python real.py OUTPUT --rank N --free BYTES               what this rank of four tunes and where it is kept
    python real.py --merge TABLE OUTPUT...                    puts tables of single releases into one file
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any
from unittest import mock

from vllm_moe_tune_plugin import coverage, no_gpu
from vllm_moe_tune_plugin.tactics import WARM_UP

sys.path.append(str(pathlib.Path(__file__).parents[1] / "stock"))
import call_sites

DATA_PARALLEL = (1, 2, 4, 8)
BATCHED_TOKENS = (2048, 8192, 16384, 65536)

# Two batch sizes: what differs between the shapes of their tensors is what depends on the number of tokens.
PROBES = (3, 5)


@dataclass(frozen=True)
class Found:
    """What serving finds for batches of 1 to `sizes` tokens.

    Attributes:
        miss: batch sizes without a tuned entry: the default tactic runs.
        beyond: batch sizes above the largest bucket: the tactic of that bucket runs.
        below: other batch sizes that run the tactic of a smaller bucket, because FlashInfer's mapping rounds down.
        profiles: buckets that warm-up tuned.
        largest: the largest of them, 0 where nothing was tuned.
    """

    sizes: int
    miss: int
    beyond: int
    below: int
    profiles: int
    largest: int


@dataclass(frozen=True)
class Asked:
    """One call of `AutoTuner.choose_one`."""

    custom_op: str
    runners: list[Any]
    config: Any
    inputs: list[Any]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        tuner = importlib.import_module("flashinfer.autotuner").AutoTuner.get()
        return tuple(tuple(size) for size in tuner._get_input_sizes(self.inputs))


def start(plugin: bool) -> list[no_gpu.Call]:
    """Prepare this process; returns the list of recorded calls."""
    no_gpu.prepare()
    if plugin:
        import vllm_moe_tune_plugin

        vllm_moe_tune_plugin.register()
    no_gpu.stand_in_platform()
    for module in ("layers.fused_moe.layer", "layers.quantization.modelopt", "warmup.kernel_warmup"):
        importlib.import_module(f"vllm.model_executor.{module}")
    no_gpu.activate()
    logging.getLogger("flashinfer.jit").setLevel(logging.ERROR)  # it says of each tactic what the stand-in does not know
    return no_gpu.record_flashinfer()


@contextlib.contextmanager
def faked(targets: dict[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for target, value in targets.items():
            module, _, name = target.rpartition(":")
            parent = importlib.import_module(module)
            *path, name = name.split(".")
            for part in path:
                parent = getattr(parent, part)
            if hasattr(parent, name):
                stack.enter_context(mock.patch.object(parent, name, value))
        yield


def without_measuring() -> contextlib.AbstractContextManager[None]:
    """FlashInfer's autotuner, with every tactic measured as equally fast and no tensors made for it."""
    tuner = "flashinfer.autotuner:AutoTuner"
    stand_ins: dict[str, Any] = {
        f"{tuner}._profile_single_kernel": lambda self, *args, **kwargs: 1.0,
        f"{tuner}._prepare_input_tensors_with_batches": lambda self, inputs, *args, **kwargs: [inputs],
    }
    # Up to 0.6.6 a kernel's placeholder tensors become whole only there.
    if hasattr(importlib.import_module("flashinfer.autotuner").AutoTuner, "save_configs"):
        stand_ins[f"{tuner}._prepare_input_tensors"] = lambda self, profile, inputs: inputs
    return faked(stand_ins)


@contextlib.contextmanager
def asking(record: Callable[[Asked], None]) -> Iterator[None]:
    """Have `record` called with each call of `choose_one`, as the kernels make it."""
    tuner = importlib.import_module("flashinfer.autotuner").AutoTuner
    inner = tuner.choose_one

    def observed(self: Any, custom_op: str, runners: Any, tuning_config: Any, inputs: Any, **kwargs: Any) -> Any:
        # A runner's state is part of the key, and CUTLASS changes it between its two GEMMs.
        record(Asked(custom_op, [copy.copy(runner) for runner in runners], tuning_config, list(inputs)))
        return inner(self, custom_op, runners, tuning_config, inputs, **kwargs)

    with mock.patch.object(tuner, "choose_one", observed):
        yield


def one_rank() -> Any:
    """A process group of one."""
    return types.SimpleNamespace(
        world_size=1,
        rank=0,
        rank_in_group=0,
        local_rank=0,
        cpu_group=None,
        barrier=lambda: None,
        broadcast_object=lambda obj, src=0: obj,
    )


def warm_up(
    batched_tokens: int, dummy_run: Callable[[int], None], managed: bool = False, rank: int = 0, ranks: int = 1
) -> None:
    """vLLM's own warm-up of FlashInfer, on one data-parallel rank.

    Args:
        dummy_run: runs the model's MoE layers on a number of this rank's tokens.
        managed: let FlashInfer manage the cache where vLLM knows that (one rank only, 0.33).
        rank, ranks: which data-parallel rank of how many the engine's configuration says that this is.
    """
    config = importlib.import_module("vllm.config")
    engine = config.VllmConfig()
    engine.scheduler_config.max_num_batched_tokens = batched_tokens
    # Otherwise vLLM takes its way for several ranks only if there are several processes.
    engine.parallel_config.enable_elastic_ep = not managed
    engine.parallel_config.data_parallel_rank = rank
    engine.parallel_config.data_parallel_size = ranks
    groups = {f"vllm.distributed.parallel_state:get_{name}_group": one_rank for name in ("world", "tp", "pp")}
    groups |= {f"{WARM_UP}:get_{name}_group": one_rank for name in ("world", "tp", "pp")}
    groups["vllm.distributed.parallel_state:get_node_count"] = lambda: 1
    with faked(groups):
        autotune(engine, dummy_run)


def autotune(engine: Any, dummy_run: Callable[[int], None]) -> None:
    """vLLM's own warm-up of FlashInfer, in the process groups that vLLM knows."""
    import torch

    model = torch.nn.Module()
    runner = types.SimpleNamespace(
        vllm_config=engine,
        scheduler_config=engine.scheduler_config,
        parallel_config=engine.parallel_config,
        max_num_reqs=256,
        max_num_tokens=engine.scheduler_config.max_num_batched_tokens,
        get_model=lambda: model,
        model=model,
        _dummy_run=lambda num_tokens, **kwargs: dummy_run(num_tokens),
    )
    importlib.import_module(WARM_UP).flashinfer_autotune(runner)


def forget() -> None:
    """As in a new process: an empty tuner, and kernels that have seen no bound."""
    core = importlib.import_module("flashinfer.fused_moe.core")
    autotuner = importlib.import_module("flashinfer.autotuner")
    tuner = autotuner.AutoTuner.get()
    tuner.clear_cache()
    for name in ("_file_configs", "_winner_partitions", "_managed_decoded"):
        if hasattr(tuner, name):
            getattr(tuner, name).clear()
    if hasattr(tuner, "_managed_cache"):
        tuner._managed_cache = None
    for name in vars(core):
        if (
            name.startswith("get_")
            and name.endswith(("_module", "_module_impl"))
            and hasattr(getattr(core, name), "cache_clear")
        ):
            getattr(core, name).cache_clear()


class Lookup:
    """Asks FlashInfer's cache what a call of a kernel would get for any number of tokens."""

    def __init__(self, first: Asked, second: Asked) -> None:
        self._asked = first
        self._shapes = tuple(
            tuple((a, b) for a, b in zip(one, other, strict=True))
            for one, other in zip(first.shapes, second.shapes, strict=True)
        )
        self._tuner = importlib.import_module("flashinfer.autotuner").AutoTuner.get()
        spec = first.config.dynamic_tensor_specs[0]
        self.bucket: Callable[[int], int] = spec.map_to_tuning_buckets

    def shapes(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        import torch

        def dimension(one: int, other: int) -> int:
            slope, rest = divmod(other - one, PROBES[1] - PROBES[0])
            assert rest == 0
            return one + slope * (tokens - PROBES[0])

        return tuple(torch.Size([dimension(*pair) for pair in shape]) for shape in self._shapes)

    def hits(self, tokens: int) -> bool:
        asked = self._asked
        answer = self._tuner.search_cache(
            asked.custom_op, asked.runners, self.shapes(tokens), asked.config, **self._with_inputs(asked.inputs)
        )
        return bool(answer[0])

    def _with_inputs(self, inputs: list[Any]) -> dict[str, Any]:
        code = type(self._tuner).search_cache.__code__
        return {"inputs": inputs} if "inputs" in code.co_varnames[: code.co_argcount] else {}

    def spans(self, sizes: int) -> Iterator[tuple[int, int, int]]:
        """(first, last, bucket) for the batch sizes that share a bucket; the mapping never falls."""
        first = 1
        while first <= sizes:
            bucket = self.bucket(first)
            low, high = first, sizes
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self.bucket(middle) == bucket else (low, middle - 1)
            yield first, low, bucket
            first = low + 1

    def found(self, sizes: int) -> Found:
        cap = self.bucket(1 << 30)
        miss = beyond = below = 0
        for first, last, bucket in self.spans(sizes):
            asked = {first, (first + last) // 2, (first + 2 * last) // 3, last}
            hits = {size for size in asked if self.hits(size)}
            if hits == asked:
                larger = last - max(first, bucket + 1) + 1 if last > bucket else 0
                if bucket == cap:
                    beyond += larger
                else:
                    below += larger
            else:
                # FlashInfer up to 0.6.6 finds the exact power of two only, if that.
                assert hits <= {bucket}, f"{hits} of {asked} are found for bucket {bucket}"
                miss += last - first + 1 - len(hits)
        tuned = self.tuned_buckets()
        return Found(sizes, miss, beyond, below, len(tuned), max(tuned, default=0))

    def tuned_buckets(self) -> set[int]:
        """The buckets for which the cache has an entry of this kernel."""
        config = self._asked.config
        largest = max(self.bucket(1 << 30), 1)
        generated = [bucket for bucket in _powers_and_steps(largest) if self.bucket(bucket) == bucket]
        return {bucket for bucket in generated if self.hits(bucket)} if config.dynamic_tensor_specs else set()


def _powers_and_steps(largest: int) -> list[int]:
    """Every number that can be a bucket of any FlashInfer: powers of two, multiples of 256 up to 4096, and the bound."""
    powers = [1 << power for power in range(31)]
    steps = list(range(256, 4097, 256))
    return sorted({size for size in (*powers, *steps, largest) if size <= largest})


def measure(calls: list[no_gpu.Call], dp_size: int, batched_tokens: int, present: set[str]) -> dict[str, Found]:
    """Warm up and ask, for every call site of the installed vLLM."""
    forget()
    setup = call_sites.Setup(dp_size=dp_size, max_num_tokens=batched_tokens)
    sites = list(call_sites.Sites(setup, calls, present).all())
    with without_measuring(), quiet():
        warm_up(batched_tokens, running(sites, calls), managed=dp_size == 1)

    serving = coverage.Serving(
        batched_tokens,
        dp_size,
        hidden_size=setup.hidden,
        intermediate_size=setup.intermediate,
        num_experts=setup.num_experts,
        top_k=setup.topk,
    )
    # vLLM splits a batch that is too large for one launch.
    largest = {kernel.caller.removeprefix(call_sites.LAYERS): kernel.largest_call for kernel in coverage.look(serving).kernels}

    found: dict[str, Found] = {}
    for site in sites:
        asked: dict[int, list[Asked]] = {}
        for probe in PROBES:
            with asking(asked.setdefault(probe, []).append):
                site.run(num_tokens=probe)
            calls.clear()
        # CUTLASS asks twice, once for each GEMM.
        answers = {Lookup(*pair).found(largest[site.function]) for pair in zip(*asked.values(), strict=True)}
        assert len(answers) == 1, f"{site.name}: {answers}"
        found[site.name] = answers.pop()
    return found


def running(sites: list[call_sites.CallSite], calls: list[no_gpu.Call]) -> Callable[[int], None]:
    """A dummy run of a model that has every kind of MoE layer."""

    def dummy_run(num_tokens: int) -> None:
        # The tensors are small: what a kernel is tuned for follows from its configuration, not from the batch.
        for site in sites:
            site.run()
        calls.clear()

    return dummy_run


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of the autotuner."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def table(configurations: list[tuple[int, int]]) -> dict[str, Any]:
    """The measurements of the installed release, stock and tuned."""
    import vllm_moe_tune_plugin
    from vllm_moe_tune_plugin.stack import installed

    calls = start(plugin=False)
    present = call_sites.find_call_sites()
    rows: dict[str, Any] = {}
    for dp_size, batched_tokens in configurations:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"] = cache
            stock = measure(calls, dp_size, batched_tokens, present)
            vllm_moe_tune_plugin.register()
            tuned = measure(calls, dp_size, batched_tokens, present)
            vllm_moe_tune_plugin.unregister()
        rows[f"{dp_size}x{batched_tokens}"] = {
            name: {"stock": asdict(stock[name]), "tuned": asdict(tuned[name])} for name in stock
        }
    return {"vllm": str(installed("vllm")), "flashinfer": str(installed("flashinfer-python")), "rows": rows}


def reporting_free(free: int) -> contextlib.AbstractContextManager[None]:
    """The GPU says that so many bytes are free."""
    return faked(
        {
            "torch.cuda:mem_get_info": lambda device=None: (free, 192 << 30),
            "torch.accelerator:get_memory_info": lambda device=None: (free, 192 << 30),
        }
    )


def layers(calls: list[no_gpu.Call], setup: call_sites.Setup) -> list[call_sites.CallSite]:
    """One place for each kernel, built anew as every engine does."""
    everywhere = call_sites.Sites(setup, calls, call_sites.find_call_sites()).all()
    return list({site.kernel: site for site in everywhere}.values())


def site_of(kernel: str, calls: list[no_gpu.Call], setup: call_sites.Setup) -> call_sites.CallSite:
    """The first place that calls a kernel."""
    everywhere = call_sites.Sites(setup, calls, call_sites.find_call_sites()).all()
    return next(site for site in everywhere if site.kernel == kernel)


#: Ways to start an engine with the plugin installed, as the environment that vLLM's loader sees.
ARRANGEMENTS: dict[str, dict[str, str]] = {
    "on": {},
    "unregistered": {},
    "VLLM_PLUGINS is empty": {"VLLM_PLUGINS": ""},
    "MOE_TUNE_DISABLE=all": {"MOE_TUNE_DISABLE": "all"},
}


def kept_in_folder(calls: list[no_gpu.Call], rank: int) -> dict[str, dict[str, str]]:
    """What one start leaves in the autotune cache's folder with four ranks and with one: each file's digest by its path."""
    found = {}
    for ranks, setup in {"four": call_sites.Setup(dp_size=4, dp_rank=rank), "one": call_sites.Setup()}.items():
        forget()
        sites = [site_of("trtllm_fp8_per_tensor_scale_moe", calls, setup)]
        with tempfile.TemporaryDirectory() as cache, without_measuring(), quiet():
            os.environ["VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"] = cache
            warm_up(8192, running(sites, calls), setup.dp_size == 1, setup.dp_rank, setup.dp_size)
            files = sorted(path for path in pathlib.Path(cache).rglob("*") if path.is_file())
            found[ranks] = {str(file.relative_to(cache)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return found


def kept(arrangement: str, calls: list[no_gpu.Call], rank: int) -> dict[str, dict[str, dict[str, str]]]:
    """:func:`kept_in_folder` before vLLM's own loader loads plugins, and after. Changes the process."""
    import vllm_moe_tune_plugin

    # Before as well, since the identity of vLLM 0.26 counts VLLM_PLUGINS itself.
    os.environ.update(ARRANGEMENTS[arrangement])
    before = kept_in_folder(calls, rank)
    importlib.import_module("vllm.plugins").load_general_plugins()
    if arrangement == "unregistered":
        assert vllm_moe_tune_plugin.status()
        vllm_moe_tune_plugin.unregister()
    return {"stock": before, "own": kept_in_folder(calls, rank)}


def kept_by_each(calls: list[no_gpu.Call], rank: int) -> dict[str, dict[str, dict[str, dict[str, str]]]]:
    """:func:`kept` of every arrangement."""
    call_sites.find_call_sites()  # reads all of vLLM's sources, once for all processes
    found = {}
    for arrangement in ARRANGEMENTS:
        # A process each, forked, because to import vLLM takes far longer than all the rest.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found[arrangement] = pool.apply(kept, (arrangement, calls, rank))
    return found


def one_of_four(rank: int, free: int) -> dict[str, Any]:
    """What one rank tunes with the plugin, under which folders it is kept, and what a second start measures."""
    import vllm_moe_tune_plugin
    from vllm_moe_tune_plugin.tactics import UntunedCalls

    calls = start(plugin=False)
    autotuner = importlib.import_module("flashinfer.autotuner")
    tuner = autotuner.AutoTuner.get()
    setup = call_sites.Setup(dp_size=4, dp_rank=rank)
    measured: list[str] = []

    def measure_one(self: Any, runner: Any, *args: Any, **kwargs: Any) -> float:
        measured.append(type(runner).__name__)
        return 1.0

    def start_engine() -> int:
        forget()
        own = layers(calls, setup)
        measured.clear()
        with without_measuring(), quiet(), mock.patch.object(autotuner.AutoTuner, "_profile_single_kernel", measure_one):
            warm_up(8192, running(own, calls), rank=rank, ranks=setup.dp_size)
        return len(measured)

    def buckets() -> dict[str, dict[str, Any]]:
        """Each kernel's bound in serving, and the buckets that FlashInfer's cache has for it."""
        found: dict[str, dict[str, Any]] = {}
        for site in layers(calls, setup):
            asked: dict[int, list[Asked]] = {}
            for probe in PROBES:
                with asking(asked.setdefault(probe, []).append):
                    site.run(num_tokens=probe)
                calls.clear()
            lookup = Lookup(*(calls_of[0] for calls_of in asked.values()))
            found[site.kernel] = {"bound": lookup.bucket(1 << 30), "tuned": sorted(lookup.tuned_buckets())}
        return found

    with tempfile.TemporaryDirectory() as cache, reporting_free(free):
        by_arrangement = kept_by_each(calls, rank)
        os.environ["VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"] = cache

        def folders() -> set[str]:
            return {path.parent.name for path in pathlib.Path(cache).rglob("*.json")}

        stock = start_engine()
        stock_buckets = buckets()
        stock_folders = folders()
        vllm_moe_tune_plugin.register()
        tuned = start_engine()
        tuned_buckets = buckets()
        keys = sorted(
            str((key[0], key[1], key[3:]) if isinstance(key, tuple) else key.file_key) for key in tuner.profiling_cache
        )
        own_folders = folders() - stock_folders
        again = start_engine()
        states = {tuning["name"]: tuning["state"] for tuning in vllm_moe_tune_plugin.status()}
        vllm_moe_tune_plugin.unregister()
        stock_again = start_engine()
        after = folders()

    counter = UntunedCalls()
    patch = counter.patch()
    patch.attempt()
    site = site_of("trtllm_fp8_per_tensor_scale_moe", calls, setup)
    forget()
    site.run(num_tokens=7)
    before_tuning = counter.as_json()
    with without_measuring(), quiet(), autotuner.autotune(True):
        site.run(num_tokens=7)
    site.run(num_tokens=7)
    while_tuned = counter.as_json()
    lost = [key for key in tuner.profiling_cache if "(8, 256)" in str(key)]
    for key in lost:
        del tuner.profiling_cache[key]
    for _ in range(2):
        site.run(num_tokens=8)
    untuned = counter.as_json()
    patch.undo()
    return {
        "states": states,
        "profiles": {"stock": stock, "tuned": tuned, "again": again, "stock_again": stock_again},
        "buckets": {"stock": stock_buckets, "tuned": tuned_buckets},
        "folders": {"stock": sorted(stock_folders), "own": sorted(own_folders), "after": sorted(after)},
        "kept": by_arrangement,
        "keys": keys,
        "untuned": {"before": before_tuning, "tuned": while_tuned, "lost": untuned},
    }


FIELDS = tuple(field.name for field in fields(Found))


def packed(release: dict[str, Any]) -> dict[str, Any]:
    """A release's table with each site's name once and each measurement as a list."""
    sites = list(dict.fromkeys(site for row in release["rows"].values() for site in row))
    rows = {
        configuration: {side: [[row[site][side][name] for name in FIELDS] for site in sites] for side in ("stock", "tuned")}
        for configuration, row in release["rows"].items()
    }
    return {**release, "sites": sites, "rows": rows}


def unpacked(release: dict[str, Any]) -> dict[str, Any]:
    """What :func:`packed` packed."""
    rows = {
        configuration: {
            site: {side: dict(zip(FIELDS, row[side][index], strict=True)) for side in ("stock", "tuned")}
            for index, site in enumerate(release["sites"])
        }
        for configuration, row in release["rows"].items()
    }
    return {**release, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("tables", type=pathlib.Path, nargs="*")
    parser.add_argument("--configurations", default="")
    parser.add_argument("--look", default="[]", help="servings of which the coverage model is asked as well")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--free", type=int, default=0, help="bytes of GPU memory that the rank is told to be free")
    parser.add_argument("--merge", action="store_true")
    options = parser.parse_args()
    if options.merge:
        merged = json.loads(options.output.read_text()) if options.output.exists() else {}
        for path in options.tables:
            release = json.loads(path.read_text())
            merged[release["vllm"]] = packed(release)
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(merged[name], separators=(',', ':'))}" for name in sorted(merged))
        options.output.write_text("{" + lines + "}\n")
        return
    wanted = [tuple(map(int, part.split("x"))) for part in options.configurations.split(",") if part]
    if options.rank is None:
        answer = table(wanted or list(itertools.product(DATA_PARALLEL, BATCHED_TOKENS)))
        looks = [coverage.look(coverage.Serving(**serving)).as_json() for serving in json.loads(options.look)]
        answer |= {"looked": looks} if looks else {}
    else:
        answer = one_of_four(options.rank, options.free)
    options.output.write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
