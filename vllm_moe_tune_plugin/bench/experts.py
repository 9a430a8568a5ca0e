"""vLLM's own MoE layer below the router, for every release: ``TritonExperts`` in the modular kernel without EP dispatch.

The modular kernel is what a model's layer calls: it quantises the input where the experts take quantised ones, gives them
workspaces, calls ``TritonExperts.apply`` and finishes the output. Nothing of that is written again here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_moe_tune_plugin.bench.shapes import BLOCK, Shape, blocks
from vllm_moe_tune_plugin.stack import exists, first_existing

FUSED_MOE = "vllm.model_executor.layers.fused_moe"


class Unsupported(Exception):
    """This release has no such layer."""


def import_vllm() -> None:
    """Import all that the layers need; without a GPU this must happen before the stand-in platform says CUDA."""
    for module in (_experts_target().partition(":")[0], f"{FUSED_MOE}.modular_kernel", f"{FUSED_MOE}.prepare_finalize"):
        importlib.import_module(module)
    importlib.import_module("vllm.v1.worker.workspace")
    importlib.import_module("vllm.config")
    with contextlib.suppress(ImportError):  # the modular kernel looks at it in 0.33; others need a package for it
        importlib.import_module(f"{FUSED_MOE}.experts.fused_humming_moe")


def renew_workspaces(device: Any) -> None:
    """Let the experts allocate their scratch again; what was allocated before lives on where it is held."""
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(device)


def workspaces() -> list[Any]:
    """The buffers of bytes that the experts' scratch tensors are views of. A graph needs those it was captured with."""
    manager = importlib.import_module("vllm.v1.worker.workspace").current_workspace_manager()
    return [buffer for buffer in manager._current_workspaces if buffer is not None]


def _experts_target() -> str:
    return first_existing(f"{FUSED_MOE}.experts.triton_moe:TritonExperts", f"{FUSED_MOE}.fused_moe:TritonExperts")


def _named(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _call(function: Callable[..., Any], **available: Any) -> Any:
    """Call a function with those of the arguments that this release's version of it takes."""
    parameters = inspect.signature(function).parameters
    return function(**{name: value for name, value in available.items() if name in parameters})


def _activation(name: str) -> Any:
    if exists(f"{FUSED_MOE}.activation"):
        return importlib.import_module(f"{FUSED_MOE}.activation").MoEActivation(name)
    return name  # a string up to 0.16


def torch_dtype(dtype: str) -> Any:
    """The type of a layer's input and output."""
    import torch

    return torch.float16 if dtype == "fp16" else torch.bfloat16


@dataclass(frozen=True)
class Weights:
    """The experts' tensors of one layer; scales and biases are None where there are none."""

    w1: Any
    w2: Any
    w1_scale: Any = None
    w2_scale: Any = None
    b1: Any = None
    b2: Any = None

    @classmethod
    def random(cls, shape: Shape, dtype: str, device: Any) -> Weights:
        """Fresh weights with which a layer's output is about as large as its input."""
        import torch

        experts, inner, hidden = shape.num_experts, shape.intermediate, shape.hidden
        b1 = b2 = None
        if shape.has_bias:
            biases = {"device": device, "dtype": torch_dtype(dtype)}
            b1, b2 = torch.randn(experts, 2 * inner, **biases) / 4, torch.randn(experts, hidden, **biases) / 4
        if dtype in ("bf16", "fp16"):

            def matrices(rows: int, columns: int) -> Any:
                return torch.empty(experts, rows, columns, dtype=torch_dtype(dtype), device=device).normal_(0, columns**-0.5)

            return cls(matrices(2 * inner, hidden), matrices(hidden, inner), b1=b1, b2=b2)

        largest = 64.0  # one standard deviation of the stored numbers, of which e4m3 holds up to 448

        def quantized(rows: int, columns: int) -> Any:
            stored = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=device)
            for some in stored.split(16):  # in parts, since the normal numbers take twice the memory
                some.copy_(torch.empty(some.shape, dtype=torch.bfloat16, device=device).normal_(0, largest).clamp_(-448, 448))
            return stored

        def scales(rows: int, columns: int) -> Any:
            squares = (blocks(rows), blocks(columns)) if dtype == "fp8-block" else ()
            return (torch.rand(experts, *squares, device=device) + 0.5) / (largest * columns**0.5)

        return cls(
            quantized(2 * inner, hidden), quantized(hidden, inner), scales(2 * inner, hidden), scales(hidden, inner), b1, b2
        )

    def of_rank(self, ep: int) -> Weights:
        """The experts of the first of ``ep`` ranks, as views."""
        mine = self.w1.size(0) // ep
        parts = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Weights(*(None if part is None else part[:mine] for part in parts))

    def dense(self, expert: int) -> tuple[Any, Any]:
        """One expert's two weights in float64."""

        def dequantized(weight: Any, scale: Any) -> Any:
            weight = weight[expert].double()
            if scale is None:
                return weight
            scale = scale[expert].double()
            if scale.dim():
                rows, columns = weight.shape
                scale = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
            return weight * scale

        return dequantized(self.w1, self.w1_scale), dequantized(self.w2, self.w2_scale)


class Layer:
    """A stock MoE layer of one shape, callable like a model's layer after its router.

    ``experts``: the class that computes it, as `module:name`; TritonExperts if empty. ``more``: fields of its FusedMoEConfig.
    """

    def __init__(
        self, shape: Shape, dtype: str, weights: Weights, ep: int, device: Any, experts: str = "", **more: Any
    ) -> None:
        self.shape = shape
        self.weights = weights.of_rank(ep)
        config = importlib.import_module(f"{FUSED_MOE}.config")
        local = shape.num_experts // ep
        self.expert_map = _expert_map(shape.num_experts, local, device) if ep > 1 else None
        built = moe_config(config, shape, local, ep, dtype, device, **more)
        experts_class = _named(experts or _experts_target())
        kernels = importlib.import_module(f"{FUSED_MOE}.modular_kernel")
        prepare = importlib.import_module(f"{FUSED_MOE}.prepare_finalize")
        # A class that does all since 0.17; up to 0.16 a module.
        kernel_class = getattr(kernels, "FusedMoEKernel", None) or kernels.FusedMoEModularKernel
        prepare_class = getattr(prepare, "MoEPrepareAndFinalizeNoDPEPModular", None) or prepare.MoEPrepareAndFinalizeNoEP
        kernel = _call(
            kernel_class,
            prepare_finalize=prepare_class(),
            fused_experts=_call(experts_class, moe_config=built, quant_config=self._quant_config(config, dtype)),
            moe_parallel_config=built.moe_parallel_config,
        )
        self._apply = kernel.apply if kernel_class.__name__ == "FusedMoEKernel" else kernel.forward
        self._activation = _activation(shape.activation)

    def _quant_config(self, config: Any, dtype: str) -> Any:
        weights = self.weights
        if dtype.startswith("fp8"):
            if weights.b1 is not None and "w1_bias" not in inspect.signature(config.fp8_w8a8_moe_quant_config).parameters:
                raise Unsupported("this vLLM's fp8 experts take no biases")
            return _call(
                config.fp8_w8a8_moe_quant_config,
                w1_scale=weights.w1_scale,
                w2_scale=weights.w2_scale,
                w1_bias=weights.b1,
                w2_bias=weights.b2,
                block_shape=[BLOCK, BLOCK] if dtype == "fp8-block" else None,
            )
        if weights.b1 is not None:
            return config.biased_moe_quant_config(weights.b1, weights.b2)
        return config.FUSED_MOE_UNQUANTIZED_CONFIG

    def __call__(self, hidden_states: Any, topk_weights: Any, topk_ids: Any) -> Any:
        return self._apply(
            hidden_states=hidden_states,
            w1=self.weights.w1,
            w2=self.weights.w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=self._activation,
            global_num_experts=self.shape.num_experts,
            expert_map=self.expert_map,
            apply_router_weight_on_input=self.shape.router_weight_on_input,
        )

    def reference(self, hidden_states: Any, topk_weights: Any, topk_ids: Any) -> Any:
        """The same in float64, expert by expert, from dequantised weights and the input as it is."""
        import torch
        from torch.nn import functional

        x, total = hidden_states.double(), torch.zeros_like(hidden_states, dtype=torch.float64)
        for expert in range(self.weights.w1.size(0)):  # the first rank's local ids are the global ones
            token, slot = (topk_ids == expert).nonzero(as_tuple=True)
            if not token.numel():
                continue
            w1, w2 = self.weights.dense(expert)
            weight = topk_weights[token, slot].double().unsqueeze(-1)
            rows = x[token] * weight if self.shape.router_weight_on_input else x[token]
            inner = rows @ w1.t()
            if self.weights.b1 is not None:
                inner += self.weights.b1[expert].double()
            if self.shape.activation == "swigluoai":  # gate and up alternate
                gate, up = inner[:, ::2].clamp(max=7.0), inner[:, 1::2].clamp(-7.0, 7.0)
                inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                gate, up = inner.chunk(2, dim=-1)
                inner = functional.silu(gate) * up
            rows = inner @ w2.t()
            if self.weights.b2 is not None:
                rows += self.weights.b2[expert].double()
            total.index_add_(0, token, rows if self.shape.router_weight_on_input else rows * weight)
        return total


def _expert_map(num_experts: int, local: int, device: Any) -> Any:
    """Local ids by global ids on the first rank; -1: the expert is on another."""
    import torch

    expert_map = torch.full((num_experts,), -1, dtype=torch.int32, device=device)
    expert_map[:local] = torch.arange(local, dtype=torch.int32, device=device)
    return expert_map


def moe_config(config: Any, shape: Shape, local: int, ep: int, dtype: str, device: Any, **more: Any) -> Any:
    """vLLM's ``FusedMoEConfig`` of the first of ``ep`` ranks, which holds ``local`` experts."""
    parallel = _call(
        config.FusedMoEParallelConfig,
        tp_size=1,
        tp_rank=0,
        pcp_size=1,
        pcp_rank=0,
        dp_size=1,
        dp_rank=0,
        ep_size=ep,
        ep_rank=0,
        sp_size=1,
        use_ep=ep > 1,
        all2all_backend="allgather_reducescatter",
        is_sequence_parallel=False,
        enable_eplb=False,
    )
    fields = {field.name for field in dataclasses.fields(config.FusedMoEConfig)}
    # Given in full where the class divides it by the TP size itself.
    width = "intermediate_size" if "intermediate_size" in fields else "intermediate_size_per_partition"
    arguments = dict(
        num_experts=shape.num_experts,
        experts_per_token=shape.top_k,
        hidden_dim=shape.hidden,
        num_local_experts=local,
        num_logical_experts=shape.num_experts,
        activation=_activation(shape.activation),
        device=device,
        routing_method=config.RoutingMethodType["Renormalize"],
        moe_parallel_config=parallel,
        in_dtype=torch_dtype(dtype),
        has_bias=shape.has_bias,
        **{width: shape.intermediate},
        **more,
    )
    return config.FusedMoEConfig(**{name: value for name, value in arguments.items() if name in fields})
