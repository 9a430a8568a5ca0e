"""Every place where stock vLLM calls a FlashInfer MoE kernel, and a way to reach it without a GPU.

`call_sites(setup)` yields the sites of the installed release. A site's name is the module and function that contain the
call, with a variant in brackets where one function serves several callers. Running one drives vLLM's own code (experts
class, quantization method or custom op) with tiny random tensors and returns the calls as FlashInfer's C++ code would get
them (see `vllm_moe_tune_plugin.no_gpu`). `find_call_sites()` reads the installed vLLM's sources and says which sites there
are, so that none can be forgotten.

As a program: `python call_sites.py FOLDER SEED` runs all sites in two forks of this process, without and with the plugin, and
each saves what they did, a list of `Outcome` as dictionaries, in the folder's file `False` or `True`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import multiprocessing
import pathlib
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_moe_tune_plugin import no_gpu

LAYERS = "vllm.model_executor.layers."
KERNEL = re.compile(r"(?:flashinfer_)?(trtllm_(?:bf16|\w+_scale)(?:_routed)?_moe|cutlass_fused_moe)")

UNREACHED: dict[str, str] = {}
"""Sites that `find_call_sites()` sees and no recipe below reaches, with the reason. Empty: all are reached."""


@dataclass(frozen=True)
class Setup:
    """What the experts are configured for. Sizes satisfy every kernel's and quantization scheme's alignment."""

    num_experts: int = 8
    topk: int = 2
    hidden: int = 256
    intermediate: int = 128
    dp_size: int = 1
    dp_rank: int = 0
    parallel: Any = None
    """The FusedMoEParallelConfig of a rank that is one of several; otherwise one is made of the data-parallel ranks alone"""
    max_num_tokens: int = 8192
    elastic_ep_max_dp_size: int | None = None


@dataclass(frozen=True)
class CallSite:
    name: str
    kernel: str
    run: Callable[..., list[no_gpu.Call]]
    """`run(ids_dtype=torch.int32, weights_dtype=torch.float32, num_tokens=3, strided=False)`"""

    limit: int | None = None
    """The most tokens that the site passes in one call, where it splits larger batches."""

    @property
    def function(self) -> str:
        """The name without the variant: what `find_call_sites` knows."""
        return self.name.split(" ")[0]


# -------------------------------------------------------------------------------------------------- the installed vLLM


@functools.cache
def find_call_sites() -> dict[str, list[tuple[str, range]]]:
    """Functions in the installed vLLM that call a FlashInfer MoE kernel, as `module:qualified name`, and where they do.

    The where is file and lines of each call.
    """
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = pathlib.Path(spec.origin).parent
    sites: dict[str, list[tuple[str, range]]] = {}

    def visit(node: ast.AST, path: pathlib.Path, scope: tuple[str, ...]) -> None:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            scope = (*scope, node.name)
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if KERNEL.fullmatch(called):
                module = ".".join(("vllm", *path.relative_to(root).with_suffix("").parts)).removeprefix(LAYERS)
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                sites.setdefault(f"{module}:{'.'.join(scope)}", []).append((str(path), lines))
        for child in ast.iter_child_nodes(node):
            visit(child, path, scope)

    for path in root.rglob("*.py"):
        text = path.read_text()
        if KERNEL.search(text):
            visit(ast.parse(text), path, ())
    return sites


def calling_site() -> str | None:
    """The site whose call to a kernel is on this thread's stack."""
    frame = sys._getframe()
    while frame is not None:
        for name, places in find_call_sites().items():
            if any(frame.f_code.co_filename == path and frame.f_lineno in lines for path, lines in places):
                return name
        frame = frame.f_back  # type: ignore[assignment]
    return None


class Recorder:
    """Records FlashInfer's calls and the sites they came from, each as if it were the first of its process."""

    def __init__(self) -> None:
        self.calls = no_gpu.record_flashinfer()
        self.sites: list[str | None] = []
        tuner = importlib.import_module("flashinfer.autotuner").AutoTuner
        choose_one = tuner.choose_one

        @functools.wraps(choose_one)
        def observed(tuner: Any, custom_op: str, runners: Any, *args: Any, **kwargs: Any) -> Any:
            self.sites.append(calling_site())
            try:
                return choose_one(tuner, custom_op, runners, *args, **kwargs)
            finally:
                # Some runners keep the bound of earlier calls in a class attribute behind a cache.
                for runner in runners:
                    refine = getattr(type(runner), "refine_tuning_config", None)
                    if refine is not None:
                        refine.__func__.cache_clear()

        tuner.choose_one = observed


def optional_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        return None


def import_without_packages(module: str, package: str) -> None:
    """Import a model's module without the rest of the model, which needs compiled ops: `package` becomes an empty one."""
    stub = types.ModuleType(package)
    parent, _, name = package.rpartition(".")
    stub.__path__ = [f"{path}/{name}" for path in importlib.import_module(parent).__path__]
    sys.modules.setdefault(package, stub)
    importlib.import_module(module)


def call(function: Callable[..., Any], **available: Any) -> Any:
    """Call with what the function takes of the available arguments, and None for what it requires beyond them."""
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if name in available:
            arguments[name] = available[name]
        elif parameter.default is parameter.empty:
            arguments[name] = None
    return function(**arguments)


# ------------------------------------------------------------------------------------------------------- configuration


@contextlib.contextmanager
def vllm_config(setup: Setup) -> Iterator[None]:
    """The engine's configuration, current while layers are built, as in a model's loading, and not in its forward pass."""
    config = importlib.import_module("vllm.config")
    engine = config.VllmConfig()
    engine.scheduler_config.max_num_batched_tokens = setup.max_num_tokens
    engine.compilation_config.max_cudagraph_capture_size = 512
    with config.set_current_vllm_config(engine):
        yield


def moe_config(setup: Setup, routing: str = "Renormalize", enable_eplb: bool = False) -> Any:
    """A FusedMoEConfig as the installed release's FusedMoE layer makes it."""
    import torch

    config = importlib.import_module(LAYERS + "fused_moe.config")
    fields = {field.name for field in dataclasses.fields(config.FusedMoEConfig)}
    parallel = setup.parallel or call(
        config.FusedMoEParallelConfig,
        tp_size=1,
        tp_rank=0,
        pcp_size=1,
        pcp_rank=0,
        dp_size=setup.dp_size,
        dp_rank=setup.dp_rank,
        ep_size=1,
        ep_rank=0,
        sp_size=1,
        use_ep=False,
        all2all_backend="allgather_reducescatter",
        is_sequence_parallel=False,
        enable_eplb=enable_eplb,
    )
    arguments = {
        "num_experts": setup.num_experts,
        "experts_per_token": setup.topk,
        "hidden_dim": setup.hidden,
        "intermediate_size": setup.intermediate,
        "num_local_experts": setup.num_experts,
        "num_logical_experts": setup.num_experts,
        "activation": activation(),
        "device": "cpu",
        "routing_method": config.RoutingMethodType[routing],
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
        "max_capture_size": 512,
        "elastic_ep_max_dp_size": setup.elastic_ep_max_dp_size,
    }
    if "intermediate_size" not in fields:
        arguments["intermediate_size_per_partition"] = setup.intermediate
    # Up to 0.19 the field's default is the size of a DP chunk, and the layer leaves it at that.
    if not hasattr(importlib.import_module("vllm.envs"), "VLLM_MOE_DP_CHUNK_SIZE"):
        arguments["max_num_tokens"] = setup.max_num_tokens
    return config.FusedMoEConfig(**{name: value for name, value in arguments.items() if name in fields})


@functools.cache
def activation() -> Any:
    """SiLU: an enumeration's member since 0.17, a string before."""
    module = optional_module(LAYERS + "fused_moe.activation")
    return "silu" if module is None else module.MoEActivation.SILU


# ------------------------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class Weights:
    """One quantization scheme: quantized tensors of random bytes, their scales, and what vLLM's experts know of them."""

    w1: Any
    w2: Any
    w1_scale: Any
    w2_scale: Any
    hidden_states: Callable[[int], Any]
    a1q_scale: Callable[[int], Any]
    quant_config: Any


def random_weights(scheme: str, setup: Setup) -> Weights:
    import torch

    config = importlib.import_module(LAYERS + "fused_moe.config")
    experts, hidden, inner = setup.num_experts, setup.hidden, setup.intermediate

    def fp8(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(torch.float8_e4m3fn)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    def bf16(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16)

    def ones(*shape: int) -> torch.Tensor:
        return torch.rand(shape) + 0.5

    if scheme == "bf16":
        return Weights(
            bf16(experts, 2 * inner, hidden),
            bf16(experts, hidden, inner),
            None,
            None,
            lambda tokens: bf16(tokens, hidden),
            lambda tokens: None,
            config.FUSED_MOE_UNQUANTIZED_CONFIG,
        )
    if scheme in ("fp8_block", "fp8_tensor", "mxfp8"):
        w1, w2 = fp8(experts, 2 * inner, hidden), fp8(experts, hidden, inner)
        if scheme == "fp8_block":
            w1_scale, w2_scale = (
                ones(experts, 2 * inner // 128, hidden // 128),
                ones(experts, hidden // 128, inner // 128),
            )
            quant_config = config.fp8_w8a8_moe_quant_config(w1_scale=w1_scale, w2_scale=w2_scale, block_shape=[128, 128])
            return Weights(w1, w2, w1_scale, w2_scale, lambda t: fp8(t, hidden), lambda t: ones(t, hidden // 128), quant_config)
        if scheme == "fp8_tensor":
            w1_scale, w2_scale = ones(experts), ones(experts)
            quant_config = call(
                config.fp8_w8a8_moe_quant_config,
                w1_scale=w1_scale,
                w2_scale=w2_scale,
                a1_scale=ones(1),
                a2_scale=ones(1),
                g1_alphas=ones(experts),
                g2_alphas=ones(experts),
                a1_gscale=ones(1),
                a2_gscale=ones(1),
            )
            return Weights(w1, w2, w1_scale, w2_scale, lambda t: fp8(t, hidden), lambda t: None, quant_config)
        w1_scale, w2_scale = integers(experts, 2 * inner, hidden // 32), integers(experts, hidden, inner // 32)
        return Weights(w1, w2, w1_scale, w2_scale, lambda t: bf16(t, hidden), lambda t: None, None)

    w1, w2 = integers(experts, 2 * inner, hidden // 2), integers(experts, hidden, inner // 2)
    if scheme == "nvfp4":
        w1_scale, w2_scale = fp8(experts, 2 * inner, hidden // 16), fp8(experts, hidden, inner // 16)
        quant_config = config.nvfp4_moe_quant_config(
            g1_alphas=ones(experts),
            g2_alphas=ones(experts),
            a1_gscale=ones(experts),
            a2_gscale=ones(experts),
            w1_scale=w1_scale,
            w2_scale=w2_scale,
        )
        return Weights(
            w1, w2, w1_scale, w2_scale, lambda t: integers(t, hidden // 2), lambda t: fp8(t, hidden // 16), quant_config
        )
    if scheme == "mxfp4":
        w1_scale, w2_scale = integers(experts, 2 * inner, hidden // 32), integers(experts, hidden, inner // 32)
        quant_config = config.mxfp4_w4a16_moe_quant_config(w1_scale=w1_scale, w2_scale=w2_scale)
        return Weights(w1, w2, w1_scale, w2_scale, lambda t: bf16(t, hidden), lambda t: None, quant_config)
    if scheme == "mxint4":
        w1_scale, w2_scale = bf16(experts, 2 * inner, hidden // 32), bf16(experts, hidden, inner // 32)
        quant_config = call(
            config.FusedMoEQuantConfig.make, quant_dtype=None, weight_dtype="int4", w1_scale=w1_scale, w2_scale=w2_scale
        )
        return Weights(w1, w2, w1_scale, w2_scale, lambda t: bf16(t, hidden), lambda t: None, quant_config)
    raise ValueError(scheme)


def random_routing(setup: Setup, ids_dtype: Any, weights_dtype: Any, num_tokens: int, strided: bool) -> tuple[Any, Any, Any]:
    """Router logits, expert ids and weights: the experts of a token are distinct, as a router's are."""
    import torch

    logits = torch.randn(num_tokens, setup.num_experts)
    weights, ids = logits.softmax(dim=-1).topk(setup.topk)
    ids, weights = ids.to(ids_dtype), weights.to(weights_dtype)
    if strided:  # every second column of a wider tensor
        ids, weights = (tensor.repeat_interleave(2, dim=1)[:, ::2] for tensor in (ids, weights))
    return logits, ids, weights


# ----------------------------------------------------------------------------------------------------- experts classes

# module, class, function that holds the call, FlashInfer's function, quantization schemes
EXPERTS = (
    ("trtllm_bf16_moe", "TrtLlmBf16Experts", "apply", "trtllm_bf16_moe", ("bf16",)),
    ("trtllm_bf16_moe", "TrtLlmBf16ExpertsMonolithic", "apply", "trtllm_bf16_moe", ("bf16",)),
    ("trtllm_bf16_moe", "TrtLlmBf16ExpertsModular", "apply", "trtllm_bf16_routed_moe", ("bf16",)),
    ("trtllm_fp8_moe", "TrtLlmFp8Experts", "_apply_per_block", "trtllm_fp8_block_scale_moe", ("fp8_block",)),
    ("trtllm_fp8_moe", "TrtLlmFp8Experts", "_apply_per_tensor", "trtllm_fp8_per_tensor_scale_moe", ("fp8_tensor",)),
    ("trtllm_fp8_moe", "TrtLlmFp8ExpertsMonolithic", "_apply_per_block", "trtllm_fp8_block_scale_moe", ("fp8_block",)),
    (
        "trtllm_fp8_moe",
        "TrtLlmFp8ExpertsMonolithic",
        "_apply_block_scale",
        "trtllm_fp8_block_scale_moe",
        ("fp8_block",),
    ),
    (
        "trtllm_fp8_moe",
        "TrtLlmFp8ExpertsMonolithic",
        "_apply_per_tensor",
        "trtllm_fp8_per_tensor_scale_moe",
        ("fp8_tensor",),
    ),
    ("trtllm_fp8_moe", "TrtLlmFp8ExpertsModular", "apply", "trtllm_fp8_block_scale_routed_moe", ("fp8_block",)),
    ("trtllm_nvfp4_moe", "TrtLlmNvFp4ExpertsMonolithic", "apply", "trtllm_fp4_block_scale_moe", ("nvfp4",)),
    ("trtllm_nvfp4_moe", "TrtLlmNvFp4ExpertsModular", "apply", "trtllm_fp4_block_scale_routed_moe", ("nvfp4",)),
    (
        "trtllm_nvfp4_moe",
        "TrtLlmNvFp4ExpertsModular",
        "_invoke_kernel",
        "trtllm_fp4_block_scale_routed_moe",
        ("nvfp4",),
    ),
    ("trtllm_mxfp4_moe", "TrtLlmMxfp4ExpertsMonolithic", "apply", "trtllm_fp4_block_scale_moe", ("mxfp4",)),
    ("trtllm_mxfp4_moe", "TrtLlmMxfp4ExpertsModular", "apply", "trtllm_fp4_block_scale_routed_moe", ("mxfp4",)),
    (
        "trtllm_mxfp4_moe",
        "TrtLlmMxfp4ExpertsModular",
        "_invoke_kernel",
        "trtllm_fp4_block_scale_routed_moe",
        ("mxfp4",),
    ),
    (
        "flashinfer_cutlass_moe",
        "FlashInferExperts",
        "apply",
        "cutlass_fused_moe",
        ("bf16", "fp8_tensor", "nvfp4", "mxfp4"),
    ),
    ("trtllm_moe", "TrtLlmGenExperts", "apply", "trtllm_fp4_block_scale_routed_moe", ("mxfp4",)),
)


class Sites:
    """The recipes; each method below yields sites of one family where the installed release has them."""

    def __init__(self, setup: Setup, calls: list[no_gpu.Call], present: Collection[str]) -> None:
        self.setup = setup
        self._calls = calls
        self._present = present

    def site(self, function: str, variant: str, kernel: str, drive: Callable[..., Any], limit: int | None = None) -> CallSite:
        """`drive(logits, ids, weights, num_tokens)` reaches the call."""
        import torch

        def run(
            ids_dtype: Any = torch.int32, weights_dtype: Any = torch.float32, num_tokens: int = 3, strided: bool = False
        ) -> list[no_gpu.Call]:
            start = len(self._calls)
            drive(*random_routing(self.setup, ids_dtype, weights_dtype, num_tokens, strided), num_tokens)
            return self._calls[start:]

        return CallSite(f"{function} [{variant}]" if variant else function, kernel, run, limit)

    def all(self) -> Iterator[CallSite]:
        yield from self.experts()
        yield from self.mxint4()
        yield from self.lora()
        yield from self.muse_spark()
        yield from self.quantization_methods()
        yield from self.mxfp4_method()

    # -- classes with `apply`

    def experts(self) -> Iterator[CallSite]:
        for module, class_name, function, kernel, schemes in EXPERTS:
            for path in (f"fused_moe.experts.{module}", f"fused_moe.{module}"):
                name = f"{path}:{class_name}.{function}"
                if name not in self._present:
                    continue
                experts_class = getattr(importlib.import_module(LAYERS + path), class_name)
                for scheme in schemes:
                    if (
                        class_name == "FlashInferExperts"
                        and f'"{scheme}"' not in inspect.getsource(experts_class)
                        and scheme == "mxfp4"
                    ):
                        continue  # takes mxfp4 since 0.17
                    weights = random_weights(scheme, self.setup)
                    with vllm_config(self.setup):
                        experts = self.build(experts_class, weights, scheme)
                    limit = None
                    if function == "_invoke_kernel" and scheme == "nvfp4":
                        limit = experts._get_chunk_size()
                    elif function == "_invoke_kernel":
                        limit = experts._max_supported_tokens(self.setup.topk, self.setup.num_experts)
                    variant = scheme if len(schemes) > 1 else ""
                    yield self.site(name, variant, kernel, functools.partial(self.apply, experts, weights), limit)

    def build(self, experts_class: Any, weights: Weights, scheme: str) -> Any:
        config = moe_config(self.setup, "Llama4" if scheme == "fp8_tensor" else "Renormalize")
        per_expert = weights.w2_scale
        return call(
            experts_class,
            moe_config=config,
            moe=config,
            quant_config=weights.quant_config,
            out_dtype=config.in_dtype,
            ep_size=1,
            tp_size=1,
            max_capture_size=512,
            gemm1_alpha=None if per_expert is None else per_expert.new_ones(self.setup.num_experts).float(),
        )

    def apply(self, experts: Any, weights: Weights, logits: Any, ids: Any, topk_weights: Any, num_tokens: int) -> None:
        import torch

        routing = getattr(experts, "routing_method_type", None)
        call(
            experts.apply,
            output=torch.full((num_tokens, self.setup.hidden), float("nan"), dtype=torch.bfloat16),
            hidden_states=weights.hidden_states(num_tokens),
            w1=weights.w1,
            w2=weights.w2,
            topk_weights=topk_weights,
            topk_ids=ids,
            router_logits=logits.bfloat16(),
            activation=activation(),
            global_num_experts=self.setup.num_experts,
            a1q_scale=weights.a1q_scale(num_tokens),
            workspace13=torch.empty(0),
            workspace2=torch.empty(0),
            apply_router_weight_on_input=getattr(routing, "name", None) == "Llama4",
        )

    def mxint4(self) -> Iterator[CallSite]:
        name = "quantization.utils.flashinfer_mxint4_moe:flashinfer_trtllm_mxint4_moe"
        if name not in self._present:
            return
        kernel = "trtllm_mxint4_block_scale_moe"
        experts = optional_module(LAYERS + "fused_moe.experts.trtllm_mxint4_moe")
        weights = random_weights("mxint4", self.setup)
        if experts is not None:
            with vllm_config(self.setup):
                monolithic = self.build(experts.TrtLlmMxint4ExpertsMonolithic, weights, "mxint4")
            yield self.site(name, "", kernel, functools.partial(self.apply, monolithic, weights))
            return
        module = optional_module(
            LAYERS + "quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16_marlin"
        ) or importlib.import_module(LAYERS + "quantization.compressed_tensors.compressed_tensors_moe")
        layer = self.layer(w13_weight_packed=weights.w1, w2_weight_packed=weights.w2, **self.scales(weights))
        method = self.method(module.CompressedTensorsWNA16MarlinMoEMethod, layer, kernel_backend="Flashinfer")
        apply = self.method_apply(method, layer, weights)

        def drive(*args: Any) -> None:
            # With FlashInfer 0.6.6, which 0.18 and 0.19 pin, the kernel returns a list, and they take it for a tensor.
            with contextlib.suppress(AttributeError):
                apply(*args)

        yield self.site(name, "", kernel, drive)

    def lora(self) -> Iterator[CallSite]:
        module = optional_module(LAYERS + "fused_moe.experts.trtllm_lora_moe")
        if module is None:
            return
        for class_name, scheme, kernel in (
            ("TrtLlmBf16LoRAExperts", "bf16", "trtllm_bf16_routed_moe"),
            ("TrtLlmMxfp4LoRAExperts", "mxfp4", "trtllm_fp4_block_scale_routed_moe"),
        ):
            if not hasattr(module, class_name):
                continue
            weights = random_weights(scheme, self.setup)
            with vllm_config(self.setup):
                experts = self.build(getattr(module, class_name), weights, scheme)
            # The LoRA GEMMs are compiled kernels around the call; without them the adapter's delta is zero.
            experts.apply_w13_lora = lambda *args, **kwargs: (None, None, None, None)
            experts.apply_w2_lora = lambda *args, **kwargs: None
            limit = None
            if scheme == "mxfp4":  # the same launch as the experts without LoRA, which split larger batches
                mxfp4 = importlib.import_module(LAYERS + "fused_moe.experts.trtllm_mxfp4_moe").TrtLlmMxfp4ExpertsModular
                limit = mxfp4._max_supported_tokens(experts, self.setup.topk, self.setup.num_experts)
            name = f"fused_moe.experts.trtllm_lora_moe:{class_name}.invoke_routed_moe"
            yield self.site(name, "adapter", kernel, self.lora_apply(experts, weights, adapter=True), limit)
            if hasattr(experts, "_batch_has_no_lora"):
                yield self.site(name, "no adapter", kernel, self.lora_apply(experts, weights, adapter=False), limit)

    def lora_apply(self, experts: Any, weights: Weights, adapter: bool) -> Callable[..., None]:
        import torch

        mapping = types.SimpleNamespace(no_lora_flag_cpu=torch.tensor([not adapter]))
        context = types.SimpleNamespace(
            punica_wrapper=types.SimpleNamespace(token_mapping_meta=mapping),
            w13_num_slices=2,
            original_hidden_states=None,
        )

        def drive(logits: Any, ids: Any, topk_weights: Any, num_tokens: int) -> None:
            experts._lora_context = context
            self.apply(experts, weights, logits, ids, topk_weights, num_tokens)

        return drive

    def muse_spark(self) -> Iterator[CallSite]:
        module_name = "vllm.models.muse_spark.nvidia.muse_moe_runner"
        name = f"{module_name}:MuseSparkTrtLlmNvFp4Experts.apply_routed"
        if name not in self._present:
            return
        import_without_packages(module_name, "vllm.models.muse_spark")
        weights = random_weights("nvfp4", self.setup)
        with vllm_config(self.setup):
            experts = self.build(sys.modules[module_name].MuseSparkTrtLlmNvFp4Experts, weights, "nvfp4")
        experts.post_gemm2_hook = _NoHook()

        def drive(logits: Any, ids: Any, topk_weights: Any, num_tokens: int) -> None:
            experts.apply_routed(
                a1q=weights.hidden_states(num_tokens),
                a1q_scale=weights.a1q_scale(num_tokens),
                topk_ids=ids,
                topk_weights=topk_weights,
                w1=weights.w1,
                w2=weights.w2,
                activation=activation(),
                global_num_experts=self.setup.num_experts,
            )

        yield self.site(name, "", "trtllm_fp4_block_scale_routed_moe", drive)

    # -- quantization methods that call a kernel, or a function or custom op around it

    def layer(self, routing: str = "Renormalize", enable_eplb: bool = False, **tensors: Any) -> Any:
        """What the methods read of a FusedMoE layer. The real one needs an initialised process group."""
        import torch

        setup = self.setup
        with vllm_config(setup):
            config = moe_config(setup, routing, enable_eplb)
        layer = types.SimpleNamespace(
            moe_config=config,
            moe_parallel_config=config.moe_parallel_config,
            activation=activation(),
            global_num_experts=setup.num_experts,
            local_num_experts=setup.num_experts,
            top_k=setup.topk,
            intermediate_size_per_partition=setup.intermediate,
            ep_rank=0,
            routing_method_type=importlib.import_module(LAYERS + "fused_moe.config").RoutingMethodType[routing],
            renormalize=routing == "Renormalize",
            apply_router_weight_on_input=routing == "Llama4",
            custom_routing_function=None,
            scoring_func="softmax",
            enable_eplb=enable_eplb,
            use_grouped_topk=False,
            **dict.fromkeys(
                (
                    "num_expert_group",
                    "topk_group",
                    "e_score_correction_bias",
                    "expert_map",
                    "expert_load_view",
                    "eplb_state",
                    "logical_to_physical_map",
                    "logical_replica_count",
                )
            ),
            routed_scaling_factor=1.0,
            **tensors,
        )
        if routing == "Llama4":
            llama4 = importlib.import_module("vllm.model_executor.models.llama4")
            layer.custom_routing_function = llama4.Llama4MoE.custom_routing_function
            layer.w13_input_scale = torch.rand(()) + 0.5
            for scale in ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar"):
                setattr(layer, scale, torch.rand(setup.num_experts) + 0.5)
        return layer

    def scales(self, weights: Weights) -> dict[str, Any]:
        return {
            "w13_weight_scale": weights.w1_scale,
            "w2_weight_scale": weights.w2_scale,
            "w13_weight_scale_inv": weights.w1_scale,
            "w2_weight_scale_inv": weights.w2_scale,
        }

    def method(self, method_class: Any, layer: Any, **state: Any) -> Any:
        """A quantization method in the state that its constructor and weight loading would leave for this backend.

        The constructors choose the backend by what the machine can do and by environment variables, in each release anew.
        """
        import torch

        method = method_class.__new__(method_class)
        if isinstance(method, torch.nn.Module):
            torch.nn.Module.__init__(method)
        for name, value in {"moe": layer.moe_config, "moe_mk": None, "moe_kernel": None, **state}.items():
            if not isinstance(inspect.getattr_static(method_class, name, None), property):
                setattr(method, name, value)
        return method

    def method_apply(
        self,
        method: Any,
        layer: Any,
        weights: Weights,
        routed: bool = False,
        hidden_states: Callable[[int], Any] | None = None,
    ) -> Callable[..., None]:
        monolithic = getattr(method, "apply_monolithic", None)
        for name in ("forward_monolithic_cuda", "apply_monolithic"):
            if not routed and hasattr(type(method), name):
                monolithic = getattr(method, name)
                break
        apply = method.apply if routed or monolithic is None else monolithic

        def drive(logits: Any, ids: Any, topk_weights: Any, num_tokens: int) -> None:
            call(
                apply,
                layer=layer,
                router=types.SimpleNamespace(select_experts=lambda **kwargs: (topk_weights, ids)),
                x=(hidden_states or weights.hidden_states)(num_tokens),
                router_logits=logits.bfloat16(),
                topk_weights=topk_weights,
                topk_ids=ids,
            )

        return drive

    def quantization_methods(self) -> Iterator[CallSite]:
        quantization = LAYERS + "quantization."
        fp8 = importlib.import_module(quantization + "fp8")
        modelopt = importlib.import_module(quantization + "modelopt")
        compressed = importlib.import_module(quantization + "compressed_tensors.compressed_tensors_moe")
        ops = "fused_moe.flashinfer_trtllm_moe:"

        name = ops + "flashinfer_fused_moe_blockscale_fp8"
        if name in self._present:
            weights = random_weights("fp8_block", self.setup)
            layer = self.layer(w13_weight=weights.w1, w2_weight=weights.w2, **self.scales(weights))
            for variant, module, class_name in (
                ("Fp8MoEMethod", fp8, "Fp8MoEMethod"),
                ("compressed tensors", compressed, "CompressedTensorsW8A8Fp8MoEMethod"),
            ):
                if "flashinfer_fused_moe_blockscale_fp8" in inspect.getsource(module):
                    method = self.method(
                        getattr(module, class_name),
                        layer,
                        fp8_backend=module.Fp8MoeBackend.FLASHINFER_TRTLLM,
                        block_quant=True,
                        weight_block_size=[128, 128],
                    )
                    yield self.site(
                        name,
                        variant,
                        "trtllm_fp8_block_scale_moe",
                        self.method_apply(method, layer, weights, hidden_states=self.bf16),
                    )

        name = ops + "fi_trtllm_fp8_per_tensor_moe"
        if name in self._present:
            weights = random_weights("fp8_tensor", self.setup)
            layer = self.layer("Llama4", w13_weight=weights.w1, w2_weight=weights.w2, **self.scales(weights))
            for variant, module, class_name in (
                ("Fp8MoEMethod", fp8, "Fp8MoEMethod"),
                ("ModelOpt", modelopt, "ModelOptFp8MoEMethod"),
                ("compressed tensors", compressed, "CompressedTensorsW8A8Fp8MoEMethod"),
            ):
                if "apply_fi_trtllm_fp8_per_tensor_moe(" in inspect.getsource(module):
                    method = self.method(
                        getattr(module, class_name),
                        layer,
                        fp8_backend=module.Fp8MoeBackend.FLASHINFER_TRTLLM,
                        block_quant=False,
                        use_inplace=False,
                        kernel=lambda *args, **kwargs: None,  # 0.14 goes on into a kernel that it makes for other backends only
                    )
                    yield self.site(
                        name,
                        variant,
                        "trtllm_fp8_per_tensor_scale_moe",
                        self.method_apply(method, layer, weights, hidden_states=self.bf16),
                    )

        for function, kernel, eplb in (
            ("flashinfer_trtllm_fp4_moe", "trtllm_fp4_block_scale_moe", False),
            ("flashinfer_trtllm_fp4_routed_moe", "trtllm_fp4_block_scale_routed_moe", True),
        ):
            name = "quantization.utils.flashinfer_fp4_moe:" + function
            if name not in self._present:
                continue
            weights = random_weights("nvfp4", self.setup)
            layer = self.layer(
                w13_weight=weights.w1,
                w2_weight=weights.w2,
                g1_scale_c=weights.quant_config.g1_alphas,
                g1_alphas=weights.quant_config.g1_alphas,
                g2_alphas=weights.quant_config.g2_alphas,
                enable_eplb=eplb,
                **self.scales(weights),
            )
            for variant, module, class_name in (
                ("ModelOpt", modelopt, "ModelOptNvFp4FusedMoE"),
                ("compressed tensors", compressed, "CompressedTensorsW4A4Nvfp4MoEMethod"),
            ):
                method = self.method(getattr(module, class_name), layer, nvfp4_backend=module.NvFp4MoeBackend.FLASHINFER_TRTLLM)
                quantized = functools.partial(self.quantized, weights)
                yield self.site(name, variant, kernel, self.method_apply(method, layer, weights, eplb, quantized))

        name = ops + "flashinfer_fused_moe_bf16"
        if name in self._present:
            module = importlib.import_module(LAYERS + "fused_moe.unquantized_fused_moe_method")
            weights = random_weights("bf16", self.setup)
            layer = self.layer(w13_weight=weights.w1, w2_weight=weights.w2)
            backend = module.UnquantizedMoeBackend.FLASHINFER_TRTLLM
            method = self.method(module.UnquantizedFusedMoEMethod, layer, unquantized_backend=backend, _is_monolithic=True)
            yield self.site(name, "", "trtllm_bf16_moe", self.method_apply(method, layer, weights))

        name = "quantization.modelopt:ModelOptMxFp8FusedMoE.apply_monolithic"
        if name in self._present:
            weights = random_weights("mxfp8", self.setup)
            layer = self.layer(w13_weight=weights.w1, w2_weight=weights.w2, **self.scales(weights))
            # The quantization of the activations is a compiled FlashInfer op.
            modelopt.mxfp8_e4m3_quantize = self.mxfp8_quantize
            backend = getattr(modelopt, "MxFp8MoeBackend", None) or modelopt.Fp8MoeBackend
            method = self.method(modelopt.ModelOptMxFp8FusedMoE, layer, mxfp8_backend=backend.FLASHINFER_TRTLLM)
            yield self.site(name, "", "trtllm_fp8_block_scale_moe", self.method_apply(method, layer, weights))

    def bf16(self, num_tokens: int) -> Any:
        import torch

        return torch.randn(num_tokens, self.setup.hidden, dtype=torch.bfloat16)

    def quantized(self, weights: Weights, num_tokens: int) -> tuple[Any, Any]:
        """Activations that an all-to-all has quantized before it sent them."""
        return weights.hidden_states(num_tokens), weights.a1q_scale(num_tokens)

    @staticmethod
    def mxfp8_quantize(x: Any, is_sf_swizzled_layout: bool) -> tuple[Any, Any]:
        import torch

        assert not is_sf_swizzled_layout
        return x.to(torch.float8_e4m3fn), torch.full((x.shape[0], x.shape[1] // 32), 127, dtype=torch.uint8)

    def mxfp4_method(self) -> Iterator[CallSite]:
        prefix = "quantization.mxfp4:Mxfp4MoEMethod."
        functions = [name.removeprefix(prefix) for name in self._present if name.startswith(prefix)]
        if not functions:
            return
        module = importlib.import_module(LAYERS + "quantization.mxfp4")
        weights = random_weights("mxfp4", self.setup)
        layer = self.layer(
            w13_weight=weights.w1,
            w2_weight=weights.w2,
            w13_bias=None,
            w2_bias=None,
            gemm1_alpha=None,
            gemm1_beta=None,
            gemm1_clamp_limit=None,
            **self.scales(weights),
        )
        # The method serves gpt-oss only.
        layer.activation = "swigluoai" if activation() == "silu" else type(activation()).SWIGLUOAI
        layer.eplb_state = layer
        state = {
            "max_capture_size": 512,
            "num_experts": self.setup.num_experts,
            "intermediate_size": self.setup.intermediate,
            "hidden_size": self.setup.hidden,
        }
        monolithic = "apply_monolithic" if "apply_monolithic" in functions else "apply"
        method = self.method(module.Mxfp4MoEMethod, layer, mxfp4_backend=module.Mxfp4Backend.SM100_FI_MXFP4_BF16, **state)
        name = prefix + monolithic
        yield self.site(name, "TRTLLM", "trtllm_fp4_block_scale_moe", self.method_apply(method, layer, weights))
        if "flashinfer_cutlass_fused_moe(" in inspect.getsource(module.Mxfp4MoEMethod.apply):
            method = self.method(module.Mxfp4MoEMethod, layer, mxfp4_backend=module.Mxfp4Backend.SM90_FI_MXFP4_BF16, **state)
            name = prefix + "apply"
            yield self.site(name, "CUTLASS", "cutlass_fused_moe", self.method_apply(method, layer, weights, routed=True))


class _NoHook:
    """Takes GEMM2's rows as Muse's finalizer does, and leaves them."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: True


def call_sites(setup: Setup, calls: list[no_gpu.Call]) -> Iterator[CallSite]:
    """The installed vLLM's sites; `calls` is what `no_gpu.record_flashinfer` gave."""
    yield from Sites(setup, calls, find_call_sites()).all()


# -------------------------------------------------------------------------------------------------- all in one process


@dataclass(frozen=True)
class Outcome:
    """What one run of one site did."""

    site: str
    run: str
    """`int32`, `int64` (the type of the ids) or `strided` (ids and weights not contiguous)"""
    limit: int | None
    reached: list[str | None]
    """The functions from which FlashInfer's tuner was asked"""
    calls: list[dict[str, Any]]
    """Each call's op, routing, tune_max_num_tokens, ids, weights and the other arguments"""
    error: str | None


def plain(value: Any) -> Any:
    """Without FlashInfer's types, which the reader may lack."""
    if isinstance(value, (list, tuple)):
        return [plain(element) for element in value]
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def run_all(setup: Setup, seed: int) -> Iterator[Outcome]:
    import torch

    recorder = Recorder()
    torch.manual_seed(seed)
    for site in list(call_sites(setup, recorder.calls)):
        for run, options in (("int32", {}), ("int64", {"ids_dtype": torch.int64}), ("strided", {"strided": True})):
            recorder.sites.clear()
            recorder.calls.clear()
            torch.manual_seed(seed)
            error = None
            try:
                site.run(**options)
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
            calls = [
                {
                    "op": call.op,
                    "routing": call.routing,
                    "tune_max_num_tokens": call.tune_max_num_tokens,
                    "ids": call.ids,
                    "weights": call.weights,
                    "others": {
                        name: plain(value)
                        for name, value in call.arguments.items()
                        if name not in (*no_gpu.IDS, *no_gpu.WEIGHTS, "routing_input_mode")
                    },
                }
                for call in recorder.calls
            ]
            yield Outcome(site.name, run, site.limit, list(recorder.sites), calls, error)


def run_arm(output: pathlib.Path, seed: int, setup: Setup, plugin: bool) -> None:
    import torch

    if plugin:
        import vllm_moe_tune_plugin

        vllm_moe_tune_plugin.register()
    # Memory that is never written reads the same in each run.
    torch.use_deterministic_algorithms(True, warn_only=True)
    for module in ("fused_moe.layer", "quantization.modelopt"):
        importlib.import_module(LAYERS + module)
    no_gpu.activate()
    torch.save([dataclasses.asdict(outcome) for outcome in run_all(setup, seed)], output)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--setup", type=ast.literal_eval, default={}, help="fields of Setup, as a dictionary")
    options = parser.parse_args()
    no_gpu.prepare()
    no_gpu.stand_in_platform()
    # What an engine has imported when it loads its plugins, and the reading of vLLM's sources: once for both arms.
    importlib.import_module("vllm.config")
    find_call_sites()
    assert not [module for module in sys.modules if "fused_moe" in module], "too early for the plugin"
    fork = multiprocessing.get_context("fork")
    outputs = {plugin: options.folder / str(plugin) for plugin in (False, True)}
    setup = Setup(**options.setup)
    arms = {plugin: fork.Process(target=run_arm, args=(outputs[plugin], options.seed, setup, plugin)) for plugin in outputs}
    for arm in arms.values():
        arm.start()
    for plugin, arm in arms.items():
        arm.join()
        if arm.exitcode:  # also of one that broke after it had saved
            outputs[plugin].unlink(missing_ok=True)


if __name__ == "__main__":
    main()
