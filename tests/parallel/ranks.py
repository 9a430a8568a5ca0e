"""What each of four ranks decides and computes: gloo processes on the CPU, in vLLM's own process groups.

Real are vLLM's groups and its configurations of parallel MoE layers, its way of bringing tokens from rank to rank, FlashInfer's
autotuner and vLLM's warm-up of it, and the decode kernels, which run in Triton's interpreter. Gloo stands for NCCL, and the
measuring of a tactic is left out, as in tests/autotune.

As a program: python ranks.py OUTPUT
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from packaging.version import Version

from vllm_moe_tune_plugin import no_gpu, status
from vllm_moe_tune_plugin.bench import experts as bench_experts
from vllm_moe_tune_plugin.bench import layer as bench_layer
from vllm_moe_tune_plugin.bench.shapes import Shape
from vllm_moe_tune_plugin.stack import exists, installed
from vllm_moe_tune_plugin.tuned_tiles import Problem
from vllm_moe_tune_plugin.tunings import decode_kernel

RANKS = 4
#: Earlier releases load CUDA's libraries with the module that brings tokens from rank to rank.
TOGETHER = (installed("vllm") or Version("0")) >= Version("0.30")
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


class GlooCommunicator:
    """What NCCL does for a group of ranks, on the CPU: gathers and sums of tokens, of which ranks have different numbers."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def all_gatherv(self, tensors: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        import torch

        gathered = []
        for tensor in tensors:
            counts = sizes or [tensor.size(0)] * RANKS
            # Padded, because gloo gathers equal parts only.
            own = tensor.new_zeros(max(counts), *tensor.shape[1:])
            own[: tensor.size(0)] = tensor
            padded = [torch.empty_like(own) for _ in counts]
            torch.distributed.all_gather(padded, own, group=self.group)
            gathered.append(torch.cat([part[:count] for part, count in zip(padded, counts, strict=True)]))
        return gathered

    def reduce_scatterv(self, tensor: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        import torch

        whole = tensor.float()
        torch.distributed.all_reduce(whole, group=self.group)
        return whole.to(tensor.dtype).split(sizes or tensor.size(0) // RANKS)[torch.distributed.get_rank()]

    def reduce_scatterv_into_output(self, tensor: Any, output: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        return output.copy_(self.reduce_scatterv(tensor, dim, sizes))


def serve_together(engine: Any, parallel: Any) -> dict[str, Any]:
    """One MoE layer, other tokens on each rank, through vLLM's own way from rank to rank.

    Returns how many tokens the decode kernel had in each of its calls, and the error of this rank's tokens against float64.
    """
    import torch

    state = importlib.import_module("vllm.distributed.parallel_state")
    all2all = importlib.import_module("vllm.distributed.device_communicators.all2all")
    context = importlib.import_module("vllm.forward_context")
    prepare = importlib.import_module(f"{LAYERS}.prepare_finalize")
    kernels = importlib.import_module(f"{LAYERS}.modular_kernel")
    config = importlib.import_module(f"{LAYERS}.config")
    group, everyone = state.get_dp_group(), state.get_ep_group()
    group.device_communicator = GlooCommunicator(group.cpu_group)
    with importlib.import_module("vllm.config").set_current_vllm_config(engine):
        everyone.device_communicator = all2all.AgRsAll2AllManager(everyone.cpu_group)

    decode = importlib.import_module("test_decode_moe")
    torch.manual_seed(3)  # all ranks draw the same and take their part
    sizes, rank = [2, 1, 3, 2], torch.distributed.get_rank()
    whole = decode.draw(sum(sizes), hidden=64, inner=32, dtype=torch.bfloat16, experts=16, top_k=3)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    mapped = expert_map(parallel, 16)
    mine = (mapped >= 0).nonzero().flatten()
    shape = Shape("tiny", 16, 3, 32, 64)

    moe = bench_experts.moe_config(config, shape, len(mine), 1, "bf16", torch.device("cpu"))
    moe = dataclasses.replace(moe, moe_parallel_config=parallel)
    triton_moe = importlib.import_module(f"{LAYERS}.experts.triton_moe")
    layer = kernels.FusedMoEKernel(
        prepare.MoEPrepareAndFinalizeNaiveDPEPModular(num_dispatchers=RANKS),
        triton_moe.TritonExperts(moe_config=moe, quant_config=config.FUSED_MOE_UNQUANTIZED_CONFIG),
    )
    seen: list[int] = []
    run = decode_kernel._run

    def counted(experts: Any, call: Any, found: Any) -> None:
        seen.append(call.topk_ids.size(0))
        run(experts, call, found)

    bench_experts.renew_workspaces(bench_layer.Interpreter().device)
    tokens = torch.tensor(sizes, dtype=torch.int32)
    with (
        mock.patch.object(decode_kernel, "_run", counted),
        context.set_forward_context(None, engine, num_tokens=sizes[rank], num_tokens_across_dp=tokens),
        context.get_forward_context().dp_metadata.sp_local_sizes(1),
    ):
        got = layer.apply(
            hidden_states=whole.x[own],
            w1=whole.w1[mine],
            w2=whole.w2[mine],
            topk_weights=whole.weights[own],
            topk_ids=whole.ids[own].int(),
            activation=importlib.import_module(f"{LAYERS}.activation").MoEActivation.SILU,
            global_num_experts=16,
            expert_map=mapped,
            apply_router_weight_on_input=False,
        ).double()
    expected = decode.reference(whole)[own]
    return {"served": seen, "error": float((got - expected).norm() / expected.norm())}


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
            "together": serve_together(engine, parallel) if name == "DP4xEP4" and TOGETHER else None,
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
