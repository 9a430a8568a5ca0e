"""Small `vllm` and `flashinfer` packages on disk, in place of releases that do not exist (yet).

They have the names and the ways of calling that the plugin looks at, and no more. As written below, all four tunings have
work to do; a test edits the sources to make another release of it.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import wrapt

from vllm_moe_tune_plugin import patching, plugin, stack
from vllm_moe_tune_plugin.tunings import autotune_bucket

#: The tunings for which this stack has work; later ones bring their own tests.
TUNINGS = ("autotune_bucket", "tuple_routing", "int32_ids", "low_latency_assignment")

LAYERS = "vllm.model_executor.layers"
FUSED_MOE = f"{LAYERS}.fused_moe"
EXPERTS = f"{FUSED_MOE}.experts"

KERNELS = (
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_mxint4_block_scale_moe",
    "cutlass_fused_moe",
)

TUPLE = "Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]"

_CORE = """
from typing import Tuple, Union
import torch
CALLS = []
"""

_KERNEL = """
def {name}(topk_ids: {ids}, hidden_states=None, tune_max_num_tokens: int = 8192):
    CALLS.append(("{name}", topk_ids, tune_max_num_tokens))
    return hidden_states
"""


def kernels(ids: str = TUPLE, names: tuple[str, ...] = KERNELS) -> str:
    """The source of ``flashinfer.fused_moe.core``, its kernels' ``topk_ids`` annotated with ``ids``."""
    return _CORE + "".join(_KERNEL.format(name=name, ids=ids) for name in names)


_PACK = f"""
from {FUSED_MOE}.utils import trtllm_moe_pack_topk_ids_weights
"""

STACK: Mapping[str, str] = {
    "flashinfer": f"from . import autotuner, fused_moe\nfrom .fused_moe import {', '.join(KERNELS)}\n",
    "flashinfer.autotuner": """
class AutoTuner:
    _instance = None
    is_tuning_mode = False

    @classmethod
    def get(cls):
        cls._instance = cls._instance or cls()
        return cls._instance
""",
    "flashinfer.fused_moe": f"from .core import {', '.join(KERNELS)}\nfrom . import utils\n",
    "flashinfer.fused_moe.core": kernels(),
    "flashinfer.fused_moe.utils": "def get_hybrid_num_tokens_buckets(cap): return (cap,)\n",
    "vllm": "",
    "vllm.config": """
CURRENT = None

def get_current_vllm_config_or_none():
    return CURRENT
""",
    "vllm.utils": "",
    "vllm.utils.flashinfer": """
import functools
import importlib

def _lazy(module, name):
    @functools.cache
    def find():
        return getattr(importlib.import_module(module), name)

    def call(*args, **kwargs):
        return find()(*args, **kwargs)

    return call

flashinfer_cutlass_fused_moe = _lazy("flashinfer.fused_moe", "cutlass_fused_moe")
flashinfer_trtllm_bf16_moe = _lazy("flashinfer.fused_moe", "trtllm_bf16_moe")
""",
    "vllm.model_executor": "",
    LAYERS: "",
    FUSED_MOE: "",
    f"{FUSED_MOE}.config": """
from dataclasses import dataclass

@dataclass
class FusedMoEConfig:
    max_num_tokens: int = 4096
    dp_size: int = 4

    def __post_init__(self):
        assert self.dp_size > 0
""",
    f"{FUSED_MOE}.utils": """
import torch

def _pack_kernel(ids, weights):
    return (ids.to(torch.int32) << 16) | weights.to(torch.bfloat16).view(torch.int16)

def trtllm_moe_pack_topk_ids_weights(topk_ids, topk_weights, block_size=1024):
    return _pack_kernel(topk_ids, topk_weights).to(torch.int32)
""",
    f"{FUSED_MOE}.fused_moe": """
ALIGNED = []

def fused_moe_kernel(a, b, c, naive_block_assignment):
    pass

def moe_align_block_size(topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=False):
    ALIGNED.append(topk_ids)
    return "sorted", "experts", "count"

class Quant:
    use_int8_w8a16 = use_int4_w4a16 = False

class TritonExperts:
    def __init__(self, block_shape=None):
        self.quant_config, self.block_shape = Quant(), block_shape

    def apply(self, output, w1, w2, topk_ids, global_num_experts=-1, expert_map=None, inside=None):
        if inside is not None:
            inside()
        return moe_align_block_size(topk_ids, 16, global_num_experts, expert_map)

class TritonWNA16Experts(TritonExperts):
    def apply(self, output, w1, w2, topk_ids, global_num_experts=-1, expert_map=None):
        return moe_align_block_size(topk_ids, 16, global_num_experts, expert_map)

class EmulatedExperts(TritonExperts):
    def apply(self, output, w1, w2, topk_ids, global_num_experts=-1, expert_map=None):
        return super().apply(output, w1, w2, topk_ids, global_num_experts=global_num_experts, expert_map=expert_map)

def fused_experts_impl(topk_ids, num_experts):
    naive_block_assignment = topk_ids.numel() * 4 <= num_experts
    return None if naive_block_assignment else moe_align_block_size(topk_ids, 16, num_experts)
""",
    EXPERTS: "",
    f"{EXPERTS}.flashinfer_cutlass_moe": """
from vllm.utils.flashinfer import flashinfer_cutlass_fused_moe

class FlashInferExperts:
    max_capture_size = 512

    def apply(self, hidden_states, topk_ids, topk_weights):
        return flashinfer_cutlass_fused_moe(topk_ids, hidden_states, tune_max_num_tokens=max(self.max_capture_size, 1))
""",
    f"{EXPERTS}.trtllm_bf16_moe": _PACK
    + """
class TrtLlmBf16ExpertsMonolithic:
    def apply(self, hidden_states, router_logits):
        from vllm.utils.flashinfer import flashinfer_trtllm_bf16_moe
        return flashinfer_trtllm_bf16_moe(router_logits, hidden_states)

class TrtLlmBf16ExpertsModular:
    def apply(self, hidden_states, topk_ids, topk_weights):
        import flashinfer
        packed = trtllm_moe_pack_topk_ids_weights(topk_ids, topk_weights)
        return flashinfer.fused_moe.trtllm_bf16_routed_moe(packed, hidden_states)
""",
    f"{EXPERTS}.trtllm_fp8_moe": _PACK
    + """
class TrtLlmFp8ExpertsModular:
    def apply(self, hidden_states, topk_ids, topk_weights):
        from flashinfer.fused_moe import trtllm_fp8_block_scale_routed_moe
        packed = trtllm_moe_pack_topk_ids_weights(topk_ids, topk_weights)
        return trtllm_fp8_block_scale_routed_moe(packed, hidden_states)
""",
    f"{EXPERTS}.trtllm_nvfp4_moe": _PACK
    + """
class TrtLlmNvFp4ExpertsModular:
    chunk = 300_000

    def _get_chunk_size(self):
        return self.chunk

    def apply(self, hidden_states, topk_ids, topk_weights):
        return self._invoke_kernel(hidden_states, topk_ids, topk_weights)

    def _invoke_kernel(self, hidden_states, topk_ids, topk_weights):
        import flashinfer
        packed = trtllm_moe_pack_topk_ids_weights(topk_ids, topk_weights)
        return flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe(topk_ids=packed, hidden_states=hidden_states)
""",
    f"{EXPERTS}.trtllm_mxfp4_moe": _PACK
    + """
class TrtLlmMxfp4ExpertsBase:
    topk = 2
    max_capture_size = 512

    def _invoke_kernel(self, hidden_states, topk_ids, topk_weights, global_num_experts):
        from flashinfer import trtllm_fp4_block_scale_routed_moe
        kwargs = {"topk_ids": trtllm_moe_pack_topk_ids_weights(topk_ids, topk_weights), "hidden_states": hidden_states}
        kwargs["tune_max_num_tokens"] = max(self.max_capture_size, 1)
        return trtllm_fp4_block_scale_routed_moe(**kwargs)

class TrtLlmMxfp4ExpertsModular(TrtLlmMxfp4ExpertsBase):
    def _max_supported_tokens(self, topk, global_num_experts):
        return 1000 * global_num_experts // topk

    def apply(self, hidden_states, topk_ids, topk_weights, global_num_experts):
        return self._invoke_kernel(hidden_states, topk_ids, topk_weights, global_num_experts)
""",
    f"{EXPERTS}.trtllm_lora_moe": """
class _TrtLlmLoRAExpertsBase:
    def apply(self, hidden_states, topk_ids, topk_weights):
        return self.invoke_routed_moe(hidden_states=hidden_states, topk_ids_and_weights=(topk_ids, topk_weights))

class TrtLlmBf16LoRAExperts(_TrtLlmLoRAExpertsBase):
    def invoke_routed_moe(self, *, hidden_states, topk_ids_and_weights):
        import flashinfer
        return flashinfer.fused_moe.trtllm_bf16_routed_moe(topk_ids_and_weights, hidden_states)
""",
    "vllm.v1": "",
    "vllm.v1.worker": "",
    "vllm.v1.worker.gpu_worker": """
class Worker:
    def compile_or_warm_up_model(self):
        return 1.5
""",
}

#: What vLLM has imported by the time a model runs.
SERVING = tuple(
    name
    for name in STACK
    if name.startswith((FUSED_MOE, "flashinfer", "vllm.utils.flashinfer", "vllm.v1.worker.gpu_worker")) and name != EXPERTS
)


def write(root: pathlib.Path, sources: Mapping[str, str], flashinfer: str | None = "0.6.18", vllm: str = "0.28.0") -> None:
    """Lay the packages and their metadata under ``root``, which stands (or will stand) on ``sys.path``."""
    for name, source in sources.items():
        path = root.joinpath(*name.split("."))
        is_package = any(other.startswith(f"{name}.") for other in sources)
        file = path / "__init__.py" if is_package else path.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    for distribution, version in (("flashinfer_python", flashinfer), ("vllm", vllm)):
        if version is not None:
            info = root / f"{distribution}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def without(*names: str) -> dict[str, str]:
    """The stack less some modules."""
    return {name: source for name, source in STACK.items() if name not in names}


def replaced(module: str, *pairs: tuple[str, str]) -> dict[str, str]:
    """The stack with some text of one module replaced."""
    source = STACK[module]
    for old, new in pairs:
        assert old in source
        source = source.replace(old, new)
    return {**STACK, module: source}


def load(*modules: str) -> Any:
    """Import modules, all that serve by default, and return the first."""
    found = [importlib.import_module(name) for name in modules or SERVING if importlib.util.find_spec(name)]
    return found[0]


def states() -> dict[str, str]:
    return {record.name: str(record.state) for record in plugin.records()}


def patches() -> dict[str, Any]:
    """The patches' records by target, of all tunings."""
    return {patch.target: patch for record in plugin.records() for patch in record.patches}


def is_wrapper(value: object) -> bool:
    return isinstance(value, wrapt.FunctionWrapper | wrapt.BoundFunctionWrapper)


def _forget() -> None:
    for cached in (stack.installed, stack._find_spec, stack.module_code, autotune_bucket.calls):
        cached.cache_clear()


@contextmanager
def new_process(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, *packages: str) -> Iterator[None]:
    """As in a new process: nothing of ``packages`` imported, nothing registered; ``folder`` comes first in ``sys.path``."""

    def belongs(name: str) -> bool:
        return name.partition(".")[0] in packages

    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if belongs(name)}
    monkeypatch.setattr(plugin, "_watch", patching.ImportWatch())
    monkeypatch.setattr(plugin, "_session", None)
    monkeypatch.setattr(patching, "_arrived", set())
    monkeypatch.syspath_prepend(folder)
    # Bytecode is kept by the file's second and size: two versions of a source would be taken for one.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    _forget()
    try:
        yield
    finally:
        try:
            plugin.stop()
        finally:
            for name in list(sys.modules):
                if belongs(name):
                    del sys.modules[name]
            sys.modules.update(kept)
            _forget()
