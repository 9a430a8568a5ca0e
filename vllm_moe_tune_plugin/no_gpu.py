"""Run stock vLLM's MoE code, FlashInfer's Python included, on a machine without a GPU.

Two things make it possible. Triton's interpreter runs `@triton.jit` kernels on CPU tensors, so the Triton experts
compute real results. FlashInfer is Python above a JIT-built C++ module: with that module replaced by a recorder,
everything down to the C++ boundary runs, which is where this package's work shows (routing format, dtypes, the
autotuner's largest bucket). Used by `vllm-moe-tune selftest` and the tests.

The order matters, since vLLM and Triton look at the machine while they are imported:

    no_gpu.prepare()                  # before torch.compile, triton, flashinfer or vllm are imported
    no_gpu.stand_in_platform()        # imports vllm.platforms only
    ...import the vLLM modules...
    no_gpu.activate()                 # from here on `current_platform.is_cuda()` is true
    calls = no_gpu.record_flashinfer()

Everything here changes the process for good; use a process of its own. A stand-in exists only where a GPU or a
compiled op would be.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import pathlib
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from vllm_moe_tune_plugin.kernels.decode_moe import Tiles

# --------------------------------------------------------------------------------------------------------- environment


def prepare() -> None:
    """Set the environment variables that vLLM, Triton and FlashInfer read while they are imported."""
    too_early = [name for name in ("triton", "vllm", "flashinfer") if name in sys.modules]
    if too_early:
        raise RuntimeError(f"no_gpu.prepare() must run before {', '.join(too_early)} is imported")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # an empty list lets vLLM keep the real triton although no driver is active
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a small helper is not worth minutes of Inductor on a CPU
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"  # else FlashInfer counts as absent without nvcc
    if "FLASHINFER_WORKSPACE_BASE" not in os.environ:
        workspace = tempfile.mkdtemp(prefix="flashinfer-")
        atexit.register(shutil.rmtree, workspace, ignore_errors=True)
        os.environ["FLASHINFER_WORKSPACE_BASE"] = workspace


# -------------------------------------------------------------------------------------------------------- the platform


def stand_in_platform(capability: tuple[int, int] = (10, 0)) -> None:
    """Give vLLM a platform with CUDA's answers and CPU tensors, and stand-ins for compiled ops that are missing.

    It stays unspecified until `activate()`: modules that see CUDA while they are imported would load the compiled extensions.
    """
    import torch

    platforms: Any = importlib.import_module("vllm.platforms")
    interface: Any = importlib.import_module("vllm.platforms.interface")

    def answer(value: Any) -> classmethod[Any, Any, Any]:
        return classmethod(lambda cls, *args, **kwargs: value)

    platform = type(
        "StandInCudaPlatform",
        (interface.Platform,),
        {
            "_enum": interface.PlatformEnum.UNSPECIFIED,
            "device_name": "cuda",
            "device_type": "cpu",
            "dispatch_key": "CPU",  # vLLM registers its custom ops for this key
            "simple_compile_backend": "eager",
            "supported_quantization": [],
            "device_control_env_var": "CUDA_VISIBLE_DEVICES",
            "get_device_capability": answer(interface.DeviceCapability(*capability)),
            "get_device_name": answer("NVIDIA stand-in"),
            "get_device_uuid": answer("GPU-stand-in"),
            "get_device_total_memory": answer(192 << 30),
            "num_compute_units": answer(132),
            "support_static_graph_mode": answer(False),
            "supports_fp8": answer(True),
            "is_arch_support_pdl": answer(False),
        },
    )
    platforms._current_platform = platform()

    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda device=None: capability
    cuda.device = lambda device: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.synchronize = lambda device=None: None
    # vLLM passes what these return on as `device=`
    accelerator: Any = torch.accelerator
    accelerator.current_device_index = cuda.current_device = lambda: torch.device("cpu")
    _register_ops()


def activate() -> None:
    """From here on the stand-in platform says that it is CUDA. Call it when the vLLM modules have been imported."""
    platforms: Any = importlib.import_module("vllm.platforms")
    interface: Any = importlib.import_module("vllm.platforms.interface")
    type(platforms._current_platform)._enum = interface.PlatformEnum.CUDA
    repair_interpreter()
    coarsen_tiles()


def with_more_rows(tiles: Tiles) -> Tiles:
    """Tiles for the interpreter, which takes milliseconds for each program, however little it does."""
    return replace(tiles, up_rows=16, down_rows=16)


def coarsen_tiles() -> None:
    """Have the decode kernels choose tiles for the interpreter."""
    from vllm_moe_tune_plugin.kernels import decode_moe

    by_formula = decode_moe.choose_tiles

    def choose_tiles(*args: Any) -> Tiles:
        return with_more_rows(by_formula(*args))

    module: Any = decode_moe
    module.choose_tiles = choose_tiles


def repair_interpreter() -> None:
    """Fill four gaps of Triton's interpreter (3.6 to 3.9), and halve its time.

    PDL intrinsics have no CPU meaning; `tl.dot` multiplies bf16 operands as raw integers; a cast to bf16 cuts the lower
    bits off, where a GPU rounds to nearest even; a bound of a loop is an array of one number, which NumPy 2.4 takes for none.
    And each call of a function inside a kernel looks all of `triton.language` through for what to replace, although the
    kernel's own call has replaced it.
    """
    import triton.language as tl
    from triton.language.extra import cuda as tl_cuda

    for intrinsic in ("gdc_wait", "gdc_launch_dependents"):
        if hasattr(tl_cuda, intrinsic):
            setattr(tl_cuda, intrinsic, lambda *args, **kwargs: None)

    np: Any = importlib.import_module("numpy")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    create_dot, cast_impl = builder.create_dot, builder.cast_impl
    if hasattr(create_dot, "__wrapped__"):
        return

    def widened(operand: Any) -> Any:
        # The interpreter keeps a bf16 as the 16 bits of its pattern; those are the upper half of the same float32.
        if operand.dtype == tl.bfloat16 and operand.data.dtype == np.uint16:
            return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return operand

    @functools.wraps(create_dot)
    def create_dot_widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    @functools.wraps(cast_impl)
    def cast_impl_rounded(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast_impl(self, src, dst_type)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # Rounding would carry some NaNs into another number.
        rounded = np.where(np.isnan(src.data), (bits >> 16) | 0x40, rounded)
        return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)

    builder.create_dot = create_dot_widened
    builder.cast_impl = cast_impl_rounded

    if hasattr(interpreter, "_LangPatchScope"):
        patch_lang = interpreter._patch_lang

        def patch_lang_once(fn: Any) -> Any:
            seen = [module for module in fn.__globals__.values() if module is tl or module is tl.core]
            stock = any(tl.core.is_builtin(module.load) for module in seen)
            return patch_lang(fn) if stock or not seen else interpreter._LangPatchScope()

        interpreter._patch_lang = patch_lang_once
        patch_tensor = interpreter._patch_lang_tensor

        def patch_tensor_bounds(tensor: Any, scope: Any) -> None:
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        interpreter._patch_lang_tensor = patch_tensor_bounds


# -------------------------------------------------------------------------------------------------------- compiled ops

_libraries: dict[str, Any] = {}  # torch.library.Library unregisters its ops when it is collected


def _register_ops() -> None:
    """Define what vLLM's compiled extensions would, where they are absent: the ops that the Triton experts call."""
    import torch
    from torch.nn import functional as F

    def define(schema: str, implementation: Callable[..., Any]) -> None:
        namespace, signature = schema.split("::")
        name = signature.split("(")[0]
        if hasattr(getattr(torch.ops, namespace), name):
            return
        library = _libraries.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
        library.define(signature)
        library.impl(name, implementation, "CompositeExplicitAutograd")

    def gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def act_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
            gate, up = x.float().chunk(2, dim=-1)
            out.copy_(activation(gate).to(x.dtype).float() * up)  # the compiled kernels round between the two as well

        return act_and_mul

    def clamped(out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float, beta: float) -> None:
        gate, up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
        out.copy_(gate * torch.sigmoid(alpha * gate) * (up + beta))

    def moe_sum(
        x: torch.Tensor, out: torch.Tensor, ids: torch.Tensor | None = None, expert_map: torch.Tensor | None = None
    ) -> None:
        if ids is not None:
            # A slot without a local expert was never written.
            local = ids.long() if expert_map is None else torch.where(ids < 0, -1, expert_map[ids.long().clamp_min(0)].long())
            x = torch.where((local < 0).unsqueeze(-1), 0, x)
        out.copy_(x.float().sum(dim=1))

    def moe_align_block_size(
        ids: torch.Tensor,
        num_experts: int,
        block_size: int,
        sorted_ids: torch.Tensor,
        expert_ids: torch.Tensor,
        num_tokens_post_padded: torch.Tensor,
        expert_map: torch.Tensor | None = None,
        scatter_idx: torch.Tensor | None = None,
    ) -> None:
        if scatter_idx is not None:
            raise NotImplementedError("the stand-in for moe_align_block_size gives no scatter indices")
        flat = ids.reshape(-1)
        sorted_ids.fill_(flat.numel())
        expert_ids.fill_(-1)
        position = 0
        for expert in range(num_experts):
            local = expert if expert_map is None else int(expert_map[expert])
            slots = (flat == expert).nonzero().reshape(-1)
            if local < 0 or slots.numel() == 0:
                continue
            sorted_ids[position : position + slots.numel()] = slots
            blocks = -(-slots.numel() // block_size)
            expert_ids[position // block_size : position // block_size + blocks] = local
            position += blocks * block_size
        num_tokens_post_padded.fill_(position)

    def topk_softmax(
        weights: torch.Tensor,
        ids: torch.Tensor,
        token_expert_indices: torch.Tensor,
        logits: torch.Tensor,
        renormalize: bool = False,
        bias: torch.Tensor | None = None,
        is_padding: torch.Tensor | None = None,
    ) -> None:
        scores = logits.float().softmax(dim=-1)
        chosen = (scores if bias is None else scores + bias).topk(weights.shape[1]).indices
        top = scores.gather(1, chosen)
        weights.copy_(top / top.sum(dim=-1, keepdim=True) if renormalize else top)
        ids.copy_(chosen)

    def quantized(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> None:
        largest = torch.finfo(out.dtype).max
        out.copy_((x.float() / scale).clamp(-largest, largest).to(out.dtype))

    def static_scaled_fp8_quant(
        out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, group_shape: Sequence[int] | None = None
    ) -> None:
        if scale.numel() != 1:
            raise NotImplementedError("the stand-in for static_scaled_fp8_quant takes one scale")
        quantized(out, x, scale)

    def dynamic_scaled_fp8_quant(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> None:
        scale.fill_(float(x.float().abs().max()) / torch.finfo(out.dtype).max)
        quantized(out, x, scale)

    def dynamic_per_token_scaled_fp8_quant(
        out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, scale_ub: torch.Tensor | None = None
    ) -> None:
        largest = torch.finfo(out.dtype).max
        absmax = x.float().abs().amax(dim=-1, keepdim=True)
        if scale_ub is not None:
            absmax = absmax.clamp(max=scale_ub)
        scale.copy_((absmax / largest).clamp_min(1 / (largest * 512)))
        quantized(out, x, scale)

    def per_token_group_fp8_quant(
        x: torch.Tensor,
        out: torch.Tensor,
        scale: torch.Tensor,
        group_size: int,
        eps: float,
        fp8_min: float,
        fp8_max: float,
        scale_ue8m0: bool,
        column_major_scales: bool = False,
        tma_aligned_scales: bool = False,
    ) -> None:
        groups = x.float().unflatten(-1, (-1, group_size))
        group_scale = groups.abs().amax(dim=-1).clamp_min(eps) / fp8_max
        if scale_ue8m0:
            group_scale = torch.exp2(torch.ceil(torch.log2(group_scale)))
        scale.copy_(group_scale)
        out.copy_((groups / group_scale.unsqueeze(-1)).clamp(fp8_min, fp8_max).flatten(-2).to(out.dtype))

    def silu_and_mul_per_block_quant(
        out: torch.Tensor,
        x: torch.Tensor,
        scale: torch.Tensor,
        group_size: int,
        scale_ub: torch.Tensor | None = None,
        is_scale_transposed: bool = False,
    ) -> None:
        gate, up = x.float().chunk(2, dim=-1)
        largest = torch.finfo(out.dtype).max
        per_token_group_fp8_quant(F.silu(gate) * up, out, scale, group_size, 1e-10, -largest, largest, False)

    define("_C::silu_and_mul(Tensor! result, Tensor input) -> ()", gated(F.silu))
    define("_C::gelu_and_mul(Tensor! out, Tensor input) -> ()", gated(F.gelu))
    define("_C::gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()", gated(functools.partial(F.gelu, approximate="tanh")))
    define(
        "_C::swigluoai_and_mul(Tensor! out, Tensor input, float alpha=1.702, float limit=7.0) -> ()",
        lambda out, x, alpha=1.702, limit=7.0: clamped(out, x[..., ::2], x[..., 1::2], limit, alpha, 1.0),
    )
    define(
        "_C::silu_and_mul_with_clamp(Tensor! out, Tensor input, float limit, float alpha, float beta) -> ()",
        lambda out, x, limit, alpha, beta: clamped(out, x.chunk(2, -1)[0], x.chunk(2, -1)[1], limit, alpha, beta),
    )
    define("_moe_C::moe_sum(Tensor input, Tensor! output, Tensor? topk_ids=None, Tensor? expert_map=None) -> ()", moe_sum)
    define(
        "_moe_C::moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, "
        "Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? maybe_expert_map=None, Tensor? scatter_idx=None) -> ()",
        moe_align_block_size,
    )
    define(
        "_moe_C::topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, "
        "bool renormalize=False, Tensor? bias=None, Tensor? is_padding=None) -> ()",
        topk_softmax,
    )
    define(
        "_C::static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
        static_scaled_fp8_quant,
    )
    define("_C::dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()", dynamic_scaled_fp8_quant)
    define(
        "_C::dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub=None) -> ()",
        dynamic_per_token_scaled_fp8_quant,
    )
    define(
        "_C::per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
        "float fp8_min, float fp8_max, bool scale_ue8m0, bool column_major_scales=False, bool tma_aligned_scales=False) -> ()",
        per_token_group_fp8_quant,
    )
    define(
        "_C::silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, int group_size, Tensor? scale_ub=None, "
        "bool is_scale_transposed=False) -> ()",
        silu_and_mul_per_block_quant,
    )
    # Asked while vLLM's quantization modules are imported.
    for query in (
        "cutlass_scaled_mm_supports_fp8",
        "cutlass_scaled_mm_supports_block_fp8",
        "cutlass_scaled_mm_supports_fp4",
        "cutlass_group_gemm_supported",
    ):
        define(f"_C::{query}(int capability) -> bool", lambda capability: False)


# ---------------------------------------------------------------------------------------------------------- FlashInfer

# FlashInfer's names for the expert ids and their weights
IDS = ("topk_ids", "expert_indices", "token_selected_experts")
WEIGHTS = ("topk_weights", "expert_weights", "token_final_scales")
_PACKED, _UNPACKED = 1, 2  # FlashInfer's RoutingInputMode


@dataclass(frozen=True)
class Call:
    """One call of a FlashInfer C++ op: its arguments by the names of the C++ parameters, tensors as copies."""

    op: str
    arguments: dict[str, Any]
    tune_max_num_tokens: int | None
    """The largest bucket of the tuning configuration with which FlashInfer's autotuner was asked; C++ never sees it.

    None for the calls that the autotuner itself makes for its profiles.
    """

    @property
    def routing(self) -> str:
        """`logits` (the kernel routes), `packed` (ids and bf16 weights in one int32) or `unpacked`."""
        if "token_selected_experts" in self.arguments:
            return "unpacked"
        if self.arguments.get("routing_logits") is not None or self.ids is None:
            return "logits"
        return "unpacked" if self.arguments.get("routing_input_mode", _PACKED) == _UNPACKED else "packed"

    @property
    def ids(self) -> Any:
        return next((self.arguments[name] for name in IDS if name in self.arguments), None)

    @property
    def weights(self) -> Any:
        return next((self.arguments[name] for name in WEIGHTS if name in self.arguments), None)


@dataclass(frozen=True)
class _CppFunction:
    """A C++ function as declared in the sources that FlashInfer's wheel brings along for its JIT."""

    returns: str
    parameters: tuple[tuple[str, str], ...]  # (type, name)

    @classmethod
    @functools.cache
    def find(cls, csrc: pathlib.Path, source: str, name: str) -> _CppFunction:
        text = next(csrc.rglob(source)).read_text()
        match = re.search(rf"^\s*([\w:<>]+) {name}\(((?:[^(){{}};]|\{{\}})*)\)\s*\{{", text, re.MULTILINE)
        if match is None:
            raise LookupError(f"{source} of the installed FlashInfer defines no function {name}")
        declared = re.split(r",(?![^<]*>)", " ".join(match[2].split()))
        parameters = (re.sub(r" const\b|&", "", parameter.split("=")[0]).strip().rsplit(" ", 1) for parameter in declared)
        return cls(match[1], tuple((kind.strip(), name) for kind, name in parameters))

    def bind(self, name: str, args: Sequence[Any]) -> dict[str, Any]:
        """Arguments by name; like tvm-ffi, refuses a wrong number or a wrong kind."""
        if len(args) != len(self.parameters):
            raise TypeError(f"{name} takes {len(self.parameters)} arguments, got {len(args)}")
        for (kind, parameter), value in zip(self.parameters, args, strict=True):
            if not _accepts(kind, value):
                raise TypeError(f"{name}: {parameter} must be {kind}, got {type(value).__name__}")
        return {parameter: value for (_, parameter), value in zip(self.parameters, args, strict=True)}


def _accepts(kind: str, value: Any) -> bool:
    import torch

    if optional := re.fullmatch(r"Optional<(.*)>", kind):
        return value is None or _accepts(optional[1], value)
    if array := re.fullmatch(r"Array<(.*)>", kind):
        return isinstance(value, (list, tuple)) and all(_accepts(array[1], element) for element in value)
    if kind in ("TensorView", "Tensor"):
        return isinstance(value, torch.Tensor)
    if kind == "DLDataType":
        return isinstance(value, torch.dtype)
    return isinstance(value, (int, float) if kind == "double" else int)  # bool and IntEnum are ints to tvm-ffi, too


def record_flashinfer() -> list[Call]:
    """Replace FlashInfer's compiled MoE modules (trtllm-gen and CUTLASS) by recorders; the list grows with each call.

    The recorders check what the C++ code checks, and what it should: it reads ids and weights without looking at their
    strides, and before FlashInfer 0.6.16 float32 weights as if they were bfloat16.
    """
    core: Any = importlib.import_module("flashinfer.fused_moe.core")
    csrc: Any = importlib.import_module("flashinfer.jit.env").FLASHINFER_CSRC_DIR
    tuner: Any = importlib.import_module("flashinfer.autotuner").AutoTuner
    calls: list[Call] = []
    asked: list[int] = []

    choose_one = tuner.choose_one

    @functools.wraps(choose_one)
    def choose_one_observed(
        self: Any, custom_op: str, runners: Any, tuning_config: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # Nothing is so large that the mapper would not bring it down to the largest bucket.
        asked[:] = [spec.map_to_tuning_buckets(1 << 30) for spec in tuning_config.dynamic_tensor_specs[:1]]
        return choose_one(self, custom_op, runners, tuning_config, inputs, *args, **kwargs)

    tuner.choose_one = choose_one_observed

    def record(source: str, function: str, op: str, args: Sequence[Any]) -> Any:
        declaration = _CppFunction.find(pathlib.Path(csrc), source, function)
        arguments = declaration.bind(op, args)
        _check_routing(op, arguments)
        copies = {name: value.clone() if hasattr(value, "clone") else value for name, value in arguments.items()}
        calls.append(Call(op, copies, asked.pop() if asked else None))
        asked.clear()
        return _result(declaration.returns, arguments)

    modules = types.SimpleNamespace(trtllm=_TrtllmModule(record), cutlass=_CutlassModule(record))

    def jit_spec(module: Any) -> Callable[..., Any]:
        spec = types.SimpleNamespace(build_and_load=lambda: module, get_library_path=lambda: "", get_library_paths=list)
        return lambda *args, **kwargs: spec

    for name in [name for name in vars(core) if re.fullmatch(r"gen_(trtllm|cutlass)\w*_fused_moe_\w*module", name)]:
        setattr(core, name, jit_spec(modules.trtllm if "trtllm" in name else modules.cutlass))
    core.setup_cubin_loader = lambda path: None
    # Questions about the device of a tensor, answered for the stand-in's.
    import torch

    for name in ("device_support_pdl", "_device_support_moe_pdl"):
        if hasattr(core, name):
            setattr(core, name, lambda device: False)
    core.get_compute_capability = lambda device: torch.cuda.get_device_capability()
    if hasattr(core, "_get_trtllm_moe_sm100_module_impl"):
        core.get_trtllm_moe_sm100_module = functools.partial(core._get_trtllm_moe_sm100_module_impl, False)
    return calls


class _TrtllmModule:
    """Stands for the built trtllm-gen module: each attribute is an op that records its call."""

    def __init__(self, record: Callable[[str, str, str, Sequence[Any]], Any]) -> None:
        self._record = record

    def trtllm_get_valid_moe_configs(self, *instance: Any) -> list[list[int]]:
        return [[8, 0], [16, 1]]  # (tile size, tactic)

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op.startswith("__"):
            raise AttributeError(op)
        return lambda *args: self._record("trtllm_fused_moe_kernel_launcher.cu", op, op, args)


class _CutlassModule:
    """Stands for the built CUTLASS module and for the runner object that its `init` makes."""

    def __init__(self, record: Callable[[str, str, str, Sequence[Any]], Any]) -> None:
        self._record = record

    def init(self, *options: Any) -> _CutlassModule:
        return self

    def set_deepgemm_jit_include_dirs(self, directories: Sequence[str]) -> None:
        pass

    def get_gemm1_tactic_count(self) -> int:
        return 2

    def get_gemm2_tactic_count(self) -> int:
        return 2

    def run_gemm_profile(self, *args: Any) -> None:
        pass

    def run_moe(self, *args: Any) -> None:
        self._record("flashinfer_cutlass_fused_moe*binding.cu", "runMoe", "cutlass_fused_moe", args)

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op.startswith("__"):
            raise AttributeError(op)

        def absent(*args: Any) -> Any:  # FlashInfer looks up more than it calls
            raise NotImplementedError(f"no stand-in for the CUTLASS module's {op}")

        return absent


def _check_routing(op: str, arguments: dict[str, Any]) -> None:
    import torch
    from packaging.version import Version

    call = Call(op, arguments, None)
    if call.routing == "logits":
        return
    ids, weights = call.ids, call.weights
    if ids.dtype != torch.int32:
        raise TypeError(f"{op}: expert ids must be int32, got {ids.dtype}")
    if not ids.is_contiguous():
        raise ValueError(f"{op}: expert ids are read as contiguous, got strides {ids.stride()}")
    if call.routing == "packed":
        return  # the weights' tensor is a place for the kernel's output
    if not weights.is_contiguous() or weights.shape != ids.shape:
        raise ValueError(
            f"{op}: weights must be contiguous and of the ids' shape {tuple(ids.shape)}, got {tuple(weights.shape)}"
        )
    allowed = {torch.float32} if op == "cutlass_fused_moe" else {torch.bfloat16, torch.float32}
    if "fp4" in op and Version(importlib.import_module("flashinfer").__version__) < Version("0.6.16"):
        allowed = {torch.bfloat16}
    if weights.dtype not in allowed:
        raise TypeError(f"{op}: weights of type {weights.dtype} would be misread")


def _result(returns: str, arguments: dict[str, Any]) -> Any:
    """What the kernel would give back, all zeros."""
    import torch

    if returns == "void":
        return arguments["output"].zero_()
    hidden = arguments["hidden_states"]
    tokens, width = hidden.shape[-2], hidden.shape[-1] * (2 if hidden.dtype == torch.uint8 else 1)  # two fp4 in a byte
    output = arguments.get("output")
    output = torch.zeros(tokens, width, dtype=torch.bfloat16) if output is None else output.zero_()
    if returns == "Tensor":
        return output
    slots = tokens * arguments["top_k"]
    permutation = torch.arange(slots, dtype=torch.int32)
    activated = torch.zeros(slots, arguments["intermediate_size"], dtype=torch.bfloat16)
    if arguments.get("do_finalize", True):
        return [output, permutation, activated]
    weights = torch.zeros(tokens, arguments["top_k"], dtype=torch.bfloat16)
    return [torch.zeros(slots, width, dtype=torch.bfloat16), weights, permutation, activated]


@contextlib.contextmanager
def autotuning(**options: Any) -> Iterator[None]:
    """FlashInfer's own `autotune` context, with every profile measured as equally fast: calls inside fill the tuner's cache."""
    autotuner: Any = importlib.import_module("flashinfer.autotuner")
    on_gpu = {
        "_profile_single_kernel": lambda self, *args, **kwargs: 1.0,
        "_prepare_input_tensors_with_batches": lambda self, inputs, *args, **kwargs: [
            inputs
        ],  # copies, sized by the GPU's cache
    }
    with contextlib.ExitStack() as stack:
        for name, stand_in in on_gpu.items():
            if hasattr(autotuner.AutoTuner, name):
                stack.enter_context(mock.patch.object(autotuner.AutoTuner, name, stand_in))
        stack.enter_context(autotuner.autotune(True, **options))
        yield
