"""Which batch sizes FlashInfer's MoE kernels are tuned for, and which tactic each batch runs: stock, and with the plugin.

FlashInfer tunes a kernel for a few numbers of tokens, its buckets, and maps each batch to one of them. Whether the bucket that
serving looks up is one that warm-up tuned depends on three parties: on the bound that vLLM's caller passes, on FlashInfer's
mapping, and on the buckets under which vLLM's warm-up runs. All three are asked: FlashInfer's own bucket functions, vLLM's own
`fi_moe_largest_bucket`, launch limits and warm-up code of the installed releases. No GPU is needed.

:func:`examine` does so in a process of its own (``python -m vllm_moe_tune_plugin.coverage``), since vLLM and FlashInfer
look for a GPU while they are imported; :func:`look` does it in this one. tests/autotune compares the result with
FlashInfer's autotuner itself.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_moe_tune_plugin import fresh, known_bad, no_gpu
from vllm_moe_tune_plugin.stack import Argument, exists, installed
from vllm_moe_tune_plugin.tactics import CUTLASS, FLOOR, WARM_UP, tunes_powers_of_two_only, warm_up_overrides_buckets
from vllm_moe_tune_plugin.tunings import autotune_bucket, warmup_buckets
from vllm_moe_tune_plugin.tunings.autotune_bucket import KERNELS

QUANTIZATIONS = ("bf16", "fp8_block", "fp8_tensor", "nvfp4", "mxfp4", "mxint4")


class CoverageError(Exception):
    """The coverage could not be found out; the message says why."""


# ------------------------------------------------------------------------------------------------- what is asked


@dataclass(frozen=True)
class Serving:
    """A serving configuration.

    Attributes:
        max_num_batched_tokens: the most tokens of one rank in one step.
        dp_size: data-parallel ranks; an MoE layer sees the tokens of all of them.
        tp_size: tensor-parallel ranks; each holds that share of every expert's intermediate size.
        hidden_size, intermediate_size, num_experts, top_k: the MoE layer, `intermediate_size` of one expert.
        quantization: one of :data:`QUANTIZATIONS`, empty for all.
        capture_size: the largest CUDA graph, which some releases pass as the bound.
        cutlass_bucket: whether MOE_TUNE_CUTLASS_BUCKET is set.
    """

    max_num_batched_tokens: int
    dp_size: int = 1
    tp_size: int = 1
    hidden_size: int = 7168
    intermediate_size: int = 2048
    num_experts: int = 256
    top_k: int = 8
    quantization: str = ""
    capture_size: int = 512
    cutlass_bucket: bool = False

    @property
    def tokens(self) -> int:
        """The most tokens that an MoE layer can see in one step."""
        return self.max_num_batched_tokens * self.dp_size


# ---------------------------------------------------------------------------------------------- what is answered


@dataclass(frozen=True)
class Span:
    """Batch sizes from `first` to `last` that look up one bucket.

    `served` is `tuned` (a tactic tuned for as many tokens or more), `below` (tuned for fewer, since FlashInfer rounds down),
    `beyond` (tuned for fewer, since no larger bucket exists) or `miss` (FlashInfer's default tactic).
    """

    first: int
    last: int
    bucket: int
    served: str

    @property
    def sizes(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Side:
    """One kernel, stock or with the plugin.

    Attributes:
        bound: the kernel's `tune_max_num_tokens`.
        buckets: what warm-up tunes, in tokens.
        spans: which bucket each batch size looks up.
    """

    bound: int
    buckets: tuple[int, ...]
    spans: tuple[Span, ...]

    def sizes(self, *served: str) -> int:
        """How many batch sizes are served so."""
        return sum(span.sizes for span in self.spans if span.served in served)

    @property
    def uncovered(self) -> float:
        """The share of batch sizes that run no tactic, or one tuned for fewer tokens."""
        return self.sizes("miss", "beyond", "below") / self.spans[-1].last


@dataclass(frozen=True)
class KernelCoverage:
    """One place where vLLM calls a FlashInfer MoE kernel.

    Attributes:
        largest_call: the most tokens in one call; vLLM splits what exceeds a launch's limit.
        extra_buckets: what the plugin has tuned in addition.
        extra_bytes: about how much more GPU memory their tuning takes at most than stock's, an estimate.
        retained: whether it stays taken after tuning, as CUTLASS's profiling workspace does.
        limits: what is not covered with the plugin, and why.
    """

    kernel: str
    caller: str
    largest_call: int
    stock: Side
    plugin: Side
    extra_buckets: tuple[int, ...]
    extra_bytes: int
    retained: bool
    limits: tuple[str, ...]


@dataclass(frozen=True)
class Coverage:
    """What :func:`look` finds."""

    serving: Serving
    vllm: str
    flashinfer: str
    kernels: tuple[KernelCoverage, ...]

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Coverage:
        def side(values: Mapping[str, Any]) -> Side:
            return Side(values["bound"], tuple(values["buckets"]), tuple(Span(**span) for span in values["spans"]))

        kernels = tuple(
            KernelCoverage(
                **{
                    **values,
                    "stock": side(values["stock"]),
                    "plugin": side(values["plugin"]),
                    "extra_buckets": tuple(values["extra_buckets"]),
                    "limits": tuple(values["limits"]),
                }
            )
            for values in data["kernels"]
        )
        return cls(Serving(**data["serving"]), data["vllm"], data["flashinfer"], kernels)


# ---------------------------------------------------------------------------------------------------- FlashInfer


@dataclass(frozen=True)
class Buckets:
    """The buckets of a kernel with one bound: FlashInfer's `DynamicTensorSpec`, as far as it matters here."""

    gen_tuning_buckets: tuple[int, ...]
    map_to_tuning_buckets: Callable[[int], int]


def kernel_buckets(bound: int) -> Buckets:
    """What the installed FlashInfer makes of a `tune_max_num_tokens`."""
    utils = importlib.import_module("flashinfer.fused_moe.utils")
    if hasattr(utils, "get_hybrid_num_tokens_buckets"):
        mapper = functools.partial(utils.map_to_hybrid_bucket, max_num_tokens=bound)
        return Buckets(tuple(utils.get_hybrid_num_tokens_buckets(bound)), mapper)
    return Buckets(
        tuple(sorted(utils.get_last_power_of_2_num_tokens_buckets(bound))),
        lambda tokens: min(utils.last_positive_power_of_2(tokens), bound),
    )


def maps_all_tensors() -> bool:
    """Whether FlashInfer maps the number of tokens in all tensors of a call, or in the first and keeps it in the others."""
    autotuner = importlib.import_module("flashinfer.autotuner")
    spec = _Like(input_idx=(0, 1), dim_idx=(0, 0), map_to_tuning_buckets=lambda tokens: 2)
    config = _Like(dynamic_tensor_specs=(spec,), constraint_specs=())
    profile = autotuner.AutoTuner._find_nearest_profile(((3,), (3,)), config)
    return bool(profile[1] == (2,))


class _Like:
    """Stands for a part of a tuning configuration. Hashable, since FlashInfer keeps what it found for one."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def spans(mapping: Callable[[int], int], sizes: int) -> Iterator[tuple[int, int, int]]:
    """The runs (first, last, bucket) of batch sizes from 1 to `sizes` that a mapping, which never falls, takes together."""
    first = 1
    while first <= sizes:
        bucket, low, high = mapping(first), first, sizes
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if mapping(middle) == bucket else (low, middle - 1)
        yield first, low, bucket
        first = low + 1


def side(bound: int, buckets: Buckets, tuned: Iterable[int], sizes: int, exact_only: bool = False) -> Side:
    """How batches of 1 to `sizes` tokens are served.

    Args:
        buckets: the kernel's own, with which serving looks up.
        tuned: what warm-up tuned.
        exact_only: whether a batch finds nothing but the entry of exactly as many tokens.
    """
    entries = frozenset(tuned)
    cap = buckets.map_to_tuning_buckets(1 << 30)
    found: list[Span] = []
    for first, last, bucket in spans(buckets.map_to_tuning_buckets, sizes):
        if bucket not in entries:
            found.append(Span(first, last, bucket, "miss"))
            continue
        covered = min(last, bucket)
        if exact_only:
            # Rounding down, the bucket is the first size of its span; but beyond the cap there is no such size.
            pieces = [(first, bucket, "tuned"), (bucket + 1, last, "miss")]
        else:
            pieces = [(first, covered, "tuned"), (max(first, covered + 1), last, "beyond" if bucket == cap else "below")]
        found.extend(Span(start, end, bucket, served) for start, end, served in pieces if start <= end)
    return Side(bound, tuple(sorted(entries)), tuple(found))


# ---------------------------------------------------------------------------------------------------------- vLLM


def warm_up_buckets(serving: Serving) -> tuple[int, ...] | None:
    """The buckets with which the installed vLLM's warm-up replaces the kernels' own, None where it does not.

    vLLM's own code is run on a model without layers, and FlashInfer's tuner is asked what is in force when the model would run.
    """
    if not warm_up_overrides_buckets():
        return None
    import torch

    warm_up = importlib.import_module(WARM_UP)
    tuner = importlib.import_module("flashinfer.autotuner").AutoTuner.get()
    seen: list[tuple[int, ...]] = []
    model = torch.nn.Module()
    runner = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=serving.max_num_batched_tokens),
        vllm_config=types.SimpleNamespace(kernel_config=types.SimpleNamespace(linear_backend="auto")),
        get_model=lambda: model,
        _dummy_run=lambda **kwargs: seen.append(tuple(tuner._override_tuning_buckets or ())),
    )
    warm_up._run_flashinfer_autotune_dummy_runs(runner)
    return tuple(sorted({bucket for buckets in seen for bucket in buckets})) or None


def _launch_limit(caller: str, serving: Serving) -> int | None:
    """The most tokens of one launch, None where vLLM knows no limit."""
    module, _, function = caller.rpartition(":")
    experts = types.SimpleNamespace(topk=serving.top_k, moe_config=types.SimpleNamespace(num_experts=serving.num_experts))
    if module.endswith("trtllm_nvfp4_moe") and splits(caller):
        chunk = _method(module, "_get_chunk_size")
        return None if chunk is None else int(chunk(experts))
    if (module.endswith("trtllm_mxfp4_moe") and splits(caller)) or function.startswith("TrtLlmMxfp4LoRAExperts."):
        supported = _method(f"{autotune_bucket.EXPERTS}.trtllm_mxfp4_moe", "_max_supported_tokens")
        return None if supported is None else int(supported(experts, serving.top_k, serving.num_experts))
    return None


def splits(caller: str) -> bool:
    """Whether a function launches the parts into which vLLM splits what exceeds a launch's limit."""
    return caller.endswith("._invoke_kernel")


def _method(module: str, name: str) -> Callable[..., Any] | None:
    """A method that one of a module's classes defines."""
    classes = vars(importlib.import_module(module)).values() if exists(module) else ()
    return next((vars(cls)[name] for cls in classes if isinstance(cls, type) and name in vars(cls)), None)


def passed_bound(kernel: str, names: frozenset[str], limit: int | None, serving: Serving) -> int:
    """The `tune_max_num_tokens` that a caller with these names passes, FlashInfer's default where it passes none."""
    if "fi_moe_largest_bucket" in names:
        utils = importlib.import_module("vllm.model_executor.layers.fused_moe.utils")
        config = types.SimpleNamespace(
            max_num_tokens=serving.max_num_batched_tokens, dp_size=serving.dp_size, elastic_ep_max_dp_size=None
        )
        bound = int(utils.fi_moe_largest_bucket(config))
        return bound if limit is None or "_get_chunk_size" not in names else min(bound, limit)
    if "max_capture_size" in names:
        return max(serving.capture_size, 1)
    function = getattr(importlib.import_module("flashinfer.fused_moe"), kernel)
    return int(Argument(function, "tune_max_num_tokens").default)


def tunes(names: frozenset[str]) -> bool:
    """Whether a caller reaches its kernel while warm-up tunes."""
    if "autotune" in names:
        # Up to 0.19 MXFP4 turned tuning off around the call, and FlashInfer before 0.6.8 obeyed; 0.20 turns it on.
        return "_is_fi_autotuning" in names
    return "_is_fi_autotuning" not in names


def quantizations_of(kernel: str, caller: str) -> tuple[str, ...]:
    """The quantizations of weights for which a caller's kernel serves."""
    if kernel == CUTLASS:
        return ("mxfp4",) if "mxfp4" in caller else ("bf16", "fp8_block", "fp8_tensor", "nvfp4", "mxfp4")
    if "fp4" in kernel:
        return ("mxfp4",) if "mxfp4" in caller.lower() or "TrtLlmGenExperts" in caller else ("nvfp4",)
    parts = {"bf16": "bf16", "fp8_block": "fp8_block", "fp8_per_tensor": "fp8_tensor", "mxint4": "mxint4"}
    return tuple(name for part, name in parts.items() if part in kernel)


# -------------------------------------------------------------------------------------------------------- memory


def profile_bytes(kernel: str, tokens: int, serving: Serving, quantization: str) -> int:
    """About how much GPU memory the tuning of one bucket takes, without the weights, which are there anyway.

    CUTLASS: what FlashInfer's `GemmProfilerBackend::getProfilerWorkspaces` adds up, without what does not grow with the tokens.
    The others: a batch, its result, and one row for each (token, expert) pair between the GEMMs; kernels pad it somewhat.
    """
    pairs = tokens * serving.top_k
    inner = serving.intermediate_size // serving.tp_size
    width = {"bf16": 2.0, "mxint4": 2.0, "mxfp4": 2.0, "nvfp4": 0.5}.get(quantization, 1.0)
    if kernel == CUTLASS:
        rows = (serving.hidden_size + inner) * width + 2 * max(2 * inner, serving.hidden_size)
        routing = 16 * 3 * 4 + 8  # 16 sampled routings
        return int(pairs * (rows + routing)) + 4 * serving.num_experts * tokens
    return int(tokens * serving.hidden_size * (width + 2) + pairs * (inner * width + serving.hidden_size * 2))


# ------------------------------------------------------------------------------------------------------ together


@dataclass(frozen=True)
class _Facts:
    """What is the same for all kernels of the installed stack."""

    context: tuple[int, ...] | None
    powers_of_two: bool
    exact_only: bool


def _kernel(kernel: str, caller: str, names: frozenset[str], serving: Serving, facts: _Facts) -> KernelCoverage:
    limit = _launch_limit(caller, serving)
    sizes = serving.tokens if limit is None or not splits(caller) else min(serving.tokens, limit)
    exact_only = facts.exact_only and kernel != CUTLASS  # its mapping looks at one tensor only
    reaches = tunes(names)
    fault = known_bad.find(kernel, installed("flashinfer-python"))

    stock_bound = passed_bound(kernel, names, limit, serving)
    stock_spec = kernel_buckets(stock_bound)
    stock_tuned = (facts.context or stock_spec.gen_tuning_buckets) if reaches else ()

    bound = stock_bound if fault is not None else _plugin_bound(kernel, stock_bound, limit, serving, facts)
    spec = kernel_buckets(bound)
    tuned: tuple[int, ...] = ()
    if reaches:
        tuned = spec.gen_tuning_buckets
        if facts.context:
            wider = None if fault is not None else warmup_buckets.widened(facts.context, spec, serving.dp_size)
            tuned = wider or facts.context

    stock = side(stock_bound, stock_spec, stock_tuned, sizes, exact_only)
    plugin = side(bound, spec, tuned, sizes, exact_only)
    largest, before = max(tuned, default=0), max(stock_tuned, default=0)
    # Of a kernel for several quantizations, the first and widest.
    quantization = serving.quantization or quantizations_of(kernel, caller)[0]
    more = profile_bytes(kernel, largest, serving, quantization) - profile_bytes(kernel, before, serving, quantization)
    return KernelCoverage(
        kernel=kernel,
        caller=caller,
        largest_call=sizes,
        stock=stock,
        plugin=plugin,
        extra_buckets=tuple(sorted(set(tuned) - set(stock_tuned))),
        extra_bytes=max(more, 0),
        retained=kernel == CUTLASS,
        limits=tuple(_limits(kernel, plugin, limit, reaches, exact_only, fault, serving)),
    )


def _plugin_bound(kernel: str, stock: int, limit: int | None, serving: Serving, facts: _Facts) -> int:
    if kernel == CUTLASS and not serving.cutlass_bucket:
        return max(serving.max_num_batched_tokens, FLOOR) if facts.context else max(stock, FLOOR)
    return autotune_bucket.bucket(stock, max(serving.tokens, FLOOR), limit, facts.powers_of_two)


def _limits(
    kernel: str,
    plugin: Side,
    limit: int | None,
    reaches: bool,
    exact_only: bool,
    fault: known_bad.Fault | None,
    serving: Serving,
) -> Iterator[str]:
    if fault is not None:
        yield f"not widened: {fault.what} ({fault.source})"
    if not reaches:
        yield "this vLLM leaves the kernel out while it tunes"
    elif exact_only and plugin.sizes("miss"):
        yield "this FlashInfer finds the exact powers of two only (its PR 2697)"
    elif plugin.sizes("below"):
        yield "this FlashInfer rounds a batch down to a power of two"
    if limit is not None and plugin.spans[-1].last > limit:
        yield f"one launch takes {limit} tokens, and this vLLM does not split what exceeds them"
    if kernel == CUTLASS and plugin.sizes("beyond") and not serving.cutlass_bucket:
        yield "larger CUTLASS buckets take memory for good: MOE_TUNE_CUTLASS_BUCKET=1 (vLLM PR 53186)"
    if kernel == CUTLASS and serving.quantization == "fp8_block":
        yield "FlashInfer does not profile CUTLASS's block-scaled FP8 GEMMs: tuning chooses nothing there"


def look(serving: Serving) -> Coverage:
    """The coverage of the installed stack. vLLM's MoE modules must be importable in this process, see :mod:`no_gpu`.

    Raises:
        CoverageError: vLLM or FlashInfer is not installed.
    """
    vllm, flashinfer = _releases()
    importlib.import_module("flashinfer.fused_moe.utils")
    facts = _Facts(
        context=warm_up_buckets(serving),
        powers_of_two=tunes_powers_of_two_only(),
        exact_only=not maps_all_tensors(),
    )
    kernels = [
        _kernel(kernel, caller, names, serving, facts)
        for kernel in KERNELS
        for caller, names in autotune_bucket.calls(kernel).items()
        if serving.quantization in ("", *quantizations_of(kernel, caller))
    ]
    return Coverage(serving, vllm, flashinfer, tuple(kernels))


def _releases() -> tuple[str, str]:
    vllm, flashinfer = installed("vllm"), installed("flashinfer-python")
    if vllm is None or flashinfer is None:
        missing = "flashinfer-python" if vllm else "vLLM"
        raise CoverageError(f"{missing} is not installed here: run this in the environment of a vLLM with FlashInfer")
    return str(vllm), str(flashinfer)


def examine(serving: Serving) -> Coverage:
    """:func:`look` in a process of its own.

    Raises:
        CoverageError: vLLM or FlashInfer is not installed, or they cannot be asked.
    """
    _releases()
    try:
        return Coverage.from_json(fresh.run(__name__, json.dumps(dataclasses.asdict(serving))))
    except fresh.FreshError as error:
        raise CoverageError(f"the installed vLLM and FlashInfer could not be asked: {error}") from error


def _main(answer: str, asked: str) -> None:
    no_gpu.prepare()
    no_gpu.stand_in_platform()
    importlib.import_module("vllm.model_executor.layers.fused_moe.layer")
    no_gpu.activate()
    pathlib.Path(answer).write_text(json.dumps(look(Serving(**json.loads(asked))).as_json()))


if __name__ == "__main__":
    _main(*sys.argv[1:])
