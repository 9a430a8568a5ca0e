"""tuple_routing: hand expert ids and routing weights to FlashInfer as they are.

What: vLLM 0.19 to 0.29 packs each (expert id, routing weight) pair into one int32 for FlashInfer's routed TRTLLM kernels.
Where the installed FlashInfer takes the two tensors as a tuple with fp32 weights, vLLM's packing function is answered
with ``(topk_ids int32, topk_weights)``, both contiguous; no packing kernel runs and the weights keep their fp32 bits
(packing rounds them to bf16, a relative error of up to 2**-9).

Where FlashInfer takes packed ids only and stock packs with torch.compile (0.19 to 0.21), one Triton launch of our own does
the casts and the packing with the same bits.

How:
* whether a kernel takes a tuple is read from its annotation. That its tuples may hold fp32 weights is in no signature,
  so there the version decides: FP4 kernels from 0.6.16 (PR 3763), the others from 0.6.18 (PRs 4352, 4478). An older FP4
  kernel would read fp32 bytes as bf16, silently;
* FlashInfer before 0.6.17 tunes FP4 tuples on ids that belong to no expert (PR 4104). While it tunes, ids stay packed;
  the tactic found serves tuples, too, since both have the same cache key;
* weights in any dtype but fp32 and bf16 stay packed.

vLLM before 0.19 packs in the middle of a function, where there is no name to replace: `unsupported`.

Upstream: vLLM PR 46872 (0.30.0); packing in Triton: PR 42527 (0.22.0).
Delete when: the oldest supported vLLM hands over tuples (0.30).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from vllm_moe_tune_plugin.patching import STOCK, Advice, Args, Kwargs, Patch, Replace, Verdict, native, unsupported
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.stack import Argument, function_names, installed, module_code, names_in

EXPERTS = "vllm.model_executor.layers.fused_moe.experts"
PACK = "trtllm_moe_pack_topk_ids_weights"

#: Each module of routed experts with the FlashInfer kernel that it calls.
ROUTED = {
    "trtllm_nvfp4_moe": "trtllm_fp4_block_scale_routed_moe",
    "trtllm_mxfp4_moe": "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_moe": "trtllm_fp8_block_scale_routed_moe",
    "trtllm_bf16_moe": "trtllm_bf16_routed_moe",
    "trtllm_lora_moe": "trtllm_bf16_routed_moe",
}


def takes_tuple(kernel: Callable[..., Any]) -> bool:
    """Whether a FlashInfer function's ``topk_ids`` may be a tuple, by its annotation."""
    parameter = inspect.signature(kernel).parameters.get("topk_ids")
    return parameter is not None and "tuple[" in str(parameter.annotation).lower()


def takes_fp32_weights(kernel: str, flashinfer: Version) -> bool:
    """Whether a FlashInfer that takes tuples reads fp32 weights in them as fp32."""
    return flashinfer >= Version("0.6.16" if "fp4" in kernel else "0.6.18")


def tunes_tuples_on_garbage(kernel: str, flashinfer: Version) -> bool:
    return "fp4" in kernel and flashinfer < Version("0.6.17")


def _flashinfer_version() -> Version | None:
    """The older of what the metadata and the imported package say, should one have been put over the other."""
    said = [installed("flashinfer-python")]
    with contextlib.suppress(InvalidVersion):
        said.append(Version(str(getattr(sys.modules.get("flashinfer"), "__version__", ""))))
    return min((version for version in said if version is not None), default=None)


def is_tuning() -> bool:
    """Whether FlashInfer's autotuner is tuning right now."""
    return bool(sys.modules["flashinfer.autotuner"].AutoTuner.get().is_tuning_mode)


def as_tuple(topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights in the form in which FlashInfer's C++ reads them without looking at strides.

    Args:
        topk_ids: [tokens, top_k], any integer dtype.
        topk_weights: [tokens, top_k], fp32 or bf16.

    Returns:
        (ids int32 contiguous, weights contiguous); tensors that are so already come back as they are.
    """
    return topk_ids.to(torch.int32).contiguous(), topk_weights.contiguous()


def _without_packing(pack: Callable[..., Any], kernel: str, flashinfer: Version) -> Advice:
    ids, weights = Argument(pack, "topk_ids"), Argument(pack, "topk_weights")
    stays_packed_while_tuning = tunes_tuples_on_garbage(kernel, flashinfer)

    def instead(_: Any, args: Args, kwargs: Kwargs) -> Any:
        topk_weights = weights.get(args, kwargs)
        if topk_weights.dtype not in (torch.float32, torch.bfloat16) or (stays_packed_while_tuning and is_tuning()):
            return STOCK
        return as_tuple(ids.get(args, kwargs), topk_weights)

    return Replace(instead, note=f"{kernel} takes a tuple")


def _with_one_launch(pack: Callable[..., Any], kernel: str) -> Advice:
    ids, weights = Argument(pack, "topk_ids"), Argument(pack, "topk_weights")

    def instead(_: Any, args: Args, kwargs: Kwargs) -> Any:
        topk_ids, topk_weights = ids.get(args, kwargs), weights.get(args, kwargs)
        if not (
            runs_triton(topk_ids)
            and topk_ids.shape == topk_weights.shape
            and topk_ids.is_contiguous()
            and topk_weights.is_contiguous()
        ):
            return STOCK
        from vllm_moe_tune_plugin.kernels.pack_topk import pack_topk

        return pack_topk(topk_ids, topk_weights)

    return Replace(instead, note=f"packed by one Triton launch; {kernel} takes packed ids only")


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether a Triton kernel can run on a tensor: on a GPU, or anywhere in Triton's interpreter."""
    if tensor.is_cuda:
        return True
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _decide(kernel: str) -> Callable[[Any], Advice | Verdict]:
    def decide(pack: Any) -> Advice | Verdict:
        function = getattr(sys.modules["flashinfer.fused_moe"], kernel, None)
        flashinfer = _flashinfer_version()
        if function is None or flashinfer is None:
            return unsupported(f"this FlashInfer has no {kernel}")
        if takes_tuple(function) and takes_fp32_weights(kernel, flashinfer):
            return _without_packing(pack, kernel, flashinfer)
        # What torch.compile made shows by the Triton kernel that it does not name.
        if not any("kernel" in name for name in function_names(pack)):
            return _with_one_launch(pack, kernel)
        what = "a tuple with bf16 weights only" if takes_tuple(function) else "packed ids only"
        return unsupported(f"{kernel} of FlashInfer {flashinfer} takes {what}")

    return decide


def _without_helper(module: str, kernel: str) -> Verdict:
    """What it means that a module has no packing function to replace."""
    code = module_code(module)
    names = names_in(code) if code is not None else frozenset()
    if kernel not in names:
        return unsupported("this vLLM has no routed experts there")
    if "int16" in names:
        return unsupported("this vLLM packs in the middle of a function")
    return native("vLLM hands over a tuple")


def patches(settings: Settings) -> Sequence[Patch]:
    return tuple(
        Patch(
            f"{EXPERTS}.{name}:{PACK}",
            _decide(kernel),
            needs=("flashinfer", "flashinfer.fused_moe", "flashinfer.autotuner"),
            missing=functools.partial(_without_helper, f"{EXPERTS}.{name}", kernel),
        )
        for name, kernel in ROUTED.items()
    )
