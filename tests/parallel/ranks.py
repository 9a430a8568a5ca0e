"""What each of four ranks decides and computes: gloo processes on the CPU, in vLLM's own process groups.

Real are vLLM's groups and its configurations of parallel MoE layers, FlashInfer's autotuner and vLLM's warm-up of it, and the
decode kernels, which run in Triton's interpreter. Only the measuring of a tactic is left out, as in tests/autotune.

As a program: python ranks.py OUTPUT
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.append(str(pathlib.Path(__file__).parents[1]))
sys.path.append(str(pathlib.Path(__file__).parents[1] / "autotune"))
sys.path.append(str(pathlib.Path(__file__).parents[1] / "stock"))
import call_sites
import real

from vllm_moe_tune_plugin import no_gpu, status
from vllm_moe_tune_plugin.stack import exists
from vllm_moe_tune_plugin.tuned_tiles import Problem
from vllm_moe_tune_plugin.tunings import decode_kernel

RANKS = 4
BATCHED_TOKENS = 8192
LAYERS = "vllm.model_executor.layers.fused_moe"
KERNEL = "trtllm_fp8_per_tensor_scale_moe"

#: Experts, experts for each token, intermediate and hidden size of a model's MoE layer.
MODELS = {"qwen3-30b-a3b": (128, 8, 768, 2048), "qwen3-next-80b-a3b": (512, 10, 512, 2048), "mixtral-8x7b": (8, 2, 14336, 4096)}


@dataclass(frozen=True)
class Layout:
    """How an engine's options share the ranks out."""

    tensor: int
    data: int
    experts: bool = False


#: Ten starts of an engine, one after the other: the ranks that lost what they had kept, before each.
STARTS: dict[str, tuple[int, ...]] = {
    "cold": (),
    "warm": (),
    "rank 3 is cold": (3,),
    "warm again": (),
    "rank 0 is cold": (0,),
    "ranks 1 and 2 are cold": (1, 2),
    "one rank is warm": (0, 1, 3),
    "all are cold": (0, 1, 2, 3),
    "warm at last": (),
    "rank 1 is cold": (1,),
}

LAYOUTS = {
    "TP4": Layout(4, 1),
    "EP4": Layout(4, 1, True),
    "DP4": Layout(1, 4),
    "DP4xEP4": Layout(1, 4, True),
    "DP2xTP2": Layout(2, 2),
}


def join(layout: Layout, rank: int, folder: str) -> Any:
    """Make this process one of the ranks; returns the engine's configuration, which is then the current one."""
    import torch

    # A file, so that no port is taken; the ranks' own sockets are on the loopback interface.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=RANKS, rank=rank)
    config = importlib.import_module("vllm.config")
    engine = config.VllmConfig()
    engine.scheduler_config.max_num_batched_tokens = BATCHED_TOKENS
    parallel = engine.parallel_config
    # Set one by one: the constructor looks for as many GPUs.
    parallel.tensor_parallel_size = parallel.world_size = layout.tensor
    parallel.data_parallel_size, parallel.data_parallel_rank = layout.data, rank // layout.tensor
    parallel.enable_expert_parallel = layout.experts
    state = importlib.import_module("vllm.distributed.parallel_state")
    with config.set_current_vllm_config(engine):
        local = rank % layout.tensor
        state.init_distributed_environment(layout.tensor, local, "env://", local, "gloo")
        state.initialize_model_parallel(layout.tensor)
    return engine


def moe_parallel(engine: Any) -> Any:
    """The FusedMoEParallelConfig that vLLM's layer makes of the engine's configuration and of this rank's groups."""
    config = importlib.import_module(f"{LAYERS}.config")
    parallel = engine.parallel_config
    return call_sites.call(
        config.FusedMoEParallelConfig.make,
        tp_size_=parallel.tensor_parallel_size,
        dp_size_=parallel.data_parallel_size,
        pcp_size_=1,
        sp_size_=1,
        vllm_parallel_config=parallel,
    )


def expert_map(parallel: Any, num_experts: int) -> Any:
    """vLLM's map from a model's experts to this rank's, -1 for those of other ranks; None: it has them all."""
    module = f"{LAYERS}.expert_map_manager"
    owner = importlib.import_module(module if exists(module) else f"{LAYERS}.layer")
    return owner.determine_expert_map(parallel.ep_size, parallel.ep_rank, num_experts)[1]


def windows(parallel: Any) -> dict[str, int]:
    """The decode kernel's window for this rank's slice of each model."""
    found = {}
    for name, (num_experts, top_k, intermediate, hidden) in MODELS.items():
        mapped = expert_map(parallel, num_experts)
        local = num_experts if mapped is None else int((mapped >= 0).sum())
        own = intermediate // parallel.tp_size
        found[name] = decode_kernel.window(Problem(num_experts, local, top_k, own, hidden, "bf16"), 3 * own * hidden * 2)
    return found


def starts(engine: Any, setup: call_sites.Setup, calls: list[no_gpu.Call], folder: str) -> dict[str, Any]:
    """What this rank tunes in each of the starts."""
    import torch

    autotuner = importlib.import_module("flashinfer.autotuner")
    cache = pathlib.Path(folder, "tactics")
    os.environ["VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"] = str(cache)
    measured: list[float] = []

    def measure_one(self: Any, *args: Any, **kwargs: Any) -> float:
        """Another time on each rank. As FlashInfer does, ranks that tune together wait for each other and take the mean."""
        group = autotuner.get_autotune_process_group() if hasattr(autotuner, "get_autotune_process_group") else None
        time = torch.ones(1)
        if group is not None:
            time = torch.rand(1)
            torch.distributed.all_reduce(time, group=group)
        measured.append(float(time))
        return measured[-1]

    torch.manual_seed(torch.distributed.get_rank())
    found: dict[str, Any] = {"measured": {}}
    files: list[str] = []
    for start, lost in STARTS.items():
        real.forget()
        if torch.distributed.get_rank() in lost and files:
            (cache / files[torch.distributed.get_rank()]).unlink()
        sites = [real.site_of(KERNEL, calls, setup)]
        measured.clear()
        torch.distributed.barrier()
        measuring = mock.patch.object(autotuner.AutoTuner, "_profile_single_kernel", measure_one)
        with real.without_measuring(), real.quiet(), measuring:
            real.autotune(engine, real.running(sites, calls))
        found["measured"][start] = measured.copy()
        torch.distributed.barrier()
        files = sorted(str(path.relative_to(cache)) for path in cache.rglob("*.json"))
        torch.distributed.barrier()  # all have seen all files before any is lost
    found["files"] = files
    asked: dict[int, list[real.Asked]] = {}
    for probe in real.PROBES:
        with real.asking(asked.setdefault(probe, []).append):
            sites[0].run(num_tokens=probe)
    lookup = real.Lookup(*(one[0] for one in asked.values()))
    found["bound"], found["buckets"] = lookup.bucket(1 << 30), sorted(lookup.tuned_buckets())
    return found


def error_of_the_sum(parallel: Any) -> float:
    """Of all ranks' outputs of the decode kernels, added up, against a dense float64 reference of the whole layer."""
    import test_decode_moe as decode
    import torch

    kernels = importlib.import_module(decode.KERNELS)
    torch.manual_seed(7)
    whole = decode.draw(5, hidden=48, inner=32, experts=8, top_k=3, absent=0.2)
    expected = decode.reference(whole)
    mapped = expert_map(parallel, 8)
    own = slice(None) if mapped is None else (mapped >= 0).nonzero().flatten()
    inner = 32 // parallel.tp_size
    columns = slice(parallel.tp_rank * inner, (parallel.tp_rank + 1) * inner)
    gate, up = whole.w1[own].chunk(2, dim=1)
    whole.w1 = torch.cat((gate[:, columns], up[:, columns]), dim=1)
    whole.w2 = whole.w2[own][..., columns].contiguous()
    whole.expert_map = mapped
    output = decode.run(kernels, whole).double()
    alone = float((output - expected).norm())
    torch.distributed.all_reduce(output)
    assert alone > 0.1 * float(expected.norm()), "a part of the ranks is not the whole"
    return float((output - expected).norm() / expected.norm())


def be_rank(name: str, rank: int, folder: str, calls: list[no_gpu.Call]) -> dict[str, Any]:
    """Register, join the others, decide, compute. What all must agree on is compared over the ranks' own group."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    importlib.import_module("vllm.plugins").load_general_plugins()
    with contextlib.redirect_stdout(sys.stderr):
        engine = join(LAYOUTS[name], rank, folder)
        parallel = moe_parallel(engine)
        setup = call_sites.Setup(dp_size=parallel.dp_size, dp_rank=parallel.dp_rank, parallel=parallel)
        states = {tuning["name"]: {patch["target"]: patch["state"] for patch in tuning["patches"]} for tuning in status()}
        experts = SimpleNamespace(moe_config=SimpleNamespace(moe_parallel_config=parallel))
        agreed = {
            "states": states,
            "windows": windows(parallel),
            "why not all tokens": decode_kernel.why_not_all_tokens(experts),
            "starts": starts(engine, setup, calls, folder),
        }
        everyone: list[Any] = [None] * RANKS
        torch.distributed.all_gather_object(everyone, agreed)
        mapped = expert_map(parallel, 128)
        return {
            "agreed": everyone,
            "tuned_after_all": {tuning["name"]: tuning["state"] for tuning in status()},
            "sizes": [parallel.tp_size, parallel.dp_size, parallel.ep_size],
            "ranks": [parallel.tp_rank, parallel.dp_rank, parallel.ep_rank],
            "experts": list(range(128)) if mapped is None else (mapped >= 0).nonzero().flatten().tolist(),
            "error": error_of_the_sum(parallel),
        }


def main() -> None:
    calls = real.start(plugin=False)
    call_sites.find_call_sites()
    importlib.import_module("test_decode_moe")
    found: dict[str, list[dict[str, Any]]] = {}
    for name in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(RANKS) as pool:
            ranks = pool.starmap_async(be_rank, [(name, rank, folder, calls) for rank in range(RANKS)], chunksize=1)
            found[name] = ranks.get(timeout=120)
    pathlib.Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
