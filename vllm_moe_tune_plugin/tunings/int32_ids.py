"""int32_ids: TRTLLM kernels get expert ids as int32, whatever the router made.

What: DeepEP, vLLM's routing simulator and custom routers give int64 ids, and FlashInfer's routed TRTLLM kernels take
nothing but int32. Most of vLLM's TRTLLM experts cast; the fp8 experts of 0.18 and the LoRA and Muse experts of 0.30 to 0.33
do not. There the ids are cast on the way in. Ids that are int32 already pass without a copy.

Upstream: the cast came to the other experts one by one (with vLLM PRs 37695, 42527 and 46872).
Delete when: every experts class of the oldest supported vLLM casts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_moe_tune_plugin.patching import Advice, Args, Kwargs, Patch, Rewrite, Verdict, native, unsupported
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.stack import Argument, class_names, exists, function_names
from vllm_moe_tune_plugin.tunings.tuple_routing import PACK

EXPERTS = "vllm.model_executor.layers.fused_moe.experts"

#: Where routed ids enter each TRTLLM experts class.
ENTRIES = (
    f"{EXPERTS}.trtllm_fp8_moe:TrtLlmFp8ExpertsModular.apply",
    f"{EXPERTS}.trtllm_nvfp4_moe:TrtLlmNvFp4ExpertsModular.apply",
    f"{EXPERTS}.trtllm_mxfp4_moe:TrtLlmMxfp4ExpertsModular.apply",
    f"{EXPERTS}.trtllm_bf16_moe:TrtLlmBf16ExpertsModular.apply",
    f"{EXPERTS}.trtllm_lora_moe:TrtLlmBf16LoRAExperts.invoke_routed_moe",
    f"{EXPERTS}.trtllm_lora_moe:TrtLlmMxfp4LoRAExperts.invoke_routed_moe",
    "vllm.models.muse_spark.nvidia.muse_moe_runner:MuseSparkTrtLlmNvFp4Experts.apply_routed",
)


def as_int32(ids: Any) -> Any:
    """Integer expert ids of any dtype and shape as int32, the same tensor where they are; anything else unchanged."""
    if not isinstance(ids, torch.Tensor) or ids.dtype == torch.int32:
        return ids
    return ids if ids.is_floating_point() or ids.is_complex() else ids.to(torch.int32)


def _decide(target: str) -> Callable[[Any], Advice | Verdict]:
    module, _, name = target.partition(":")

    def decide(function: Any) -> Advice | Verdict:
        experts = getattr(sys.modules[module], name.partition(".")[0])
        names = class_names(experts) | function_names(function)
        packer = getattr(sys.modules[module], PACK, None)
        if PACK in names and packer is not None:
            names |= function_names(packer)
        if "int32" in names:
            return native("vLLM casts the ids")
        if "topk_ids_and_weights" in inspect.signature(function).parameters:
            pair = Argument(function, "topk_ids_and_weights")

            def cast_pair(_: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
                ids, weights = pair.get(args, kwargs)
                cast = as_int32(ids)
                return None if cast is ids else pair.put(args, kwargs, (cast, weights))

            return Rewrite(cast_pair)
        argument = Argument(function, "topk_ids")

        def cast_ids(_: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
            ids = argument.get(args, kwargs)
            cast = as_int32(ids)
            return None if cast is ids else argument.put(args, kwargs, cast)

        return Rewrite(cast_ids)

    return decide


def patches(settings: Settings) -> Sequence[Patch]:
    entries = [
        Patch(target, _decide(target), missing=lambda: unsupported("this vLLM has no such experts")) for target in ENTRIES
    ]
    if not exists("flashinfer"):
        for patch in entries:  # nothing will ever import these modules
            patch.settle(unsupported("flashinfer-python is not installed"))
    return entries
