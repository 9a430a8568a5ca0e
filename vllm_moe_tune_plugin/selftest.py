"""What can be run of the tunings' code without an engine, run on this machine against references.

Two fresh processes do the work (``python -m vllm_moe_tune_plugin.selftest FILE PART``):

* ``layers``: vLLM's own Triton experts in its modular kernel, stock and tuned, against a dense float64 reference, on the GPU
  or, where there is none, in Triton's interpreter;
* ``flashinfer``: FlashInfer's own Python as vLLM's patched code calls it, down to the call of its C++ code, which is
  recorded. It needs no GPU and uses none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm_moe_tune_plugin import fresh, gpu, plugin, register, status, tactics, unregister
from vllm_moe_tune_plugin.bench import experts
from vllm_moe_tune_plugin.bench import layer as bench
from vllm_moe_tune_plugin.bench.experts import Layer, Weights
from vllm_moe_tune_plugin.bench.shapes import BLOCK, Shape, draw_routing
from vllm_moe_tune_plugin.ledger import State
from vllm_moe_tune_plugin.stack import exists

PARTS = ("layers", "flashinfer")

#: Tuned may be this much further from the reference than stock, in relative error, before it counts as wrong.
MARGIN = 1.1
#: Relative error of the smallest results, where stock's own is near nothing.
FLOOR = {"bf16": 1e-2, "fp16": 2e-3, "fp8-block": 0.1}


class SelftestError(Exception):
    """The test could not be made; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was run: ``stock`` and ``tuned`` say what came out without and with the plugin."""

    what: str
    tunings: str
    stock: str
    tuned: str
    passed: bool


def run() -> list[Check]:
    """Run everything.

    Raises:
        SelftestError: vLLM is not installed, or a part broke.
    """
    if not exists("vllm"):
        raise SelftestError("vLLM is not installed here: run this in vLLM's environment, or pip install vllm")
    checks: list[Check] = []
    for part in PARTS if exists("flashinfer") else PARTS[:1]:
        try:
            checks += [Check(**check) for check in fresh.run(__name__, part)]
        except fresh.FreshError as error:
            raise SelftestError(f"the part {part} broke: {error}") from error
    return checks


# ---- layers


@dataclasses.dataclass(frozen=True)
class Compared:
    """One layer, stock and tuned.

    Attributes:
        stock, tuned: relative error against float64.
        acted: the tunings that changed a call.
        states: of all tunings.
    """

    dtype: str
    tokens: int
    stock: float
    tuned: float
    acted: Sequence[str]
    states: Mapping[str, str]


def compare(shape: Shape, dtypes: Sequence[str], tokens: Sequence[int], machine: bench.Machine) -> Iterator[Compared]:
    """vLLM's MoE layer with new weights, inputs and routings, with outputs and workspaces full of NaN before each run."""
    import torch

    with torch.inference_mode(), bench.vllm_config():
        for dtype in dtypes:
            layer = Layer(shape, dtype, Weights.random(shape, dtype, machine.device), 1, machine.device)
            for count in tokens:
                x = torch.randn(count, shape.hidden, dtype=experts.torch_dtype(dtype), device=machine.device)
                ids, weights = (part[0] for part in draw_routing(shape, "uniform", 1, count, machine.device))
                reference = layer.reference(x, weights, ids)
                errors = {}
                for arm in (bench.STOCK, bench.TUNED):
                    program = bench.Program(arm)
                    machine.prepare(program, lambda: [layer(x, weights, ids)])  # noqa: B023  (used before they change)
                    machine.run_poisoned(program)
                    errors[arm.name] = float((program.outputs[0].double() - reference).norm() / reference.norm())
                # Of the session that the tuned arm began: a captured graph counts when it is captured.
                look = status()
                unregister()
                acted = [tuning["name"] for tuning in look if tuning["tuned"]]
                states = {tuning["name"]: tuning["state"] for tuning in look}
                yield Compared(dtype, count, errors["stock"], errors["tuned"], acted, states)


def _layers() -> Iterator[Check]:
    import torch

    machine = bench.start(interpret=not torch.cuda.is_available())
    # 16 experts of two each: sorting is skipped up to 2 tokens, the decode kernel takes up to 4.
    shape = Shape("selftest", num_experts=16, top_k=2, intermediate=64, hidden=96)
    rows = compare(shape, ("bf16", "fp16"), (1, 2, 3, 5), machine)
    if gpu.capability(machine.device) >= (8, 9):
        blocks = dataclasses.replace(shape, intermediate=BLOCK, hidden=BLOCK)
        rows = itertools.chain(rows, compare(blocks, ("fp8-block",), (1, 3, 5), machine))
    for row in rows:
        yield Check(
            f"Triton experts, {row.dtype}, {row.tokens} token{'s' * (row.tokens > 1)}, against float64",
            ", ".join(row.acted),
            f"error {row.stock:.1e}",
            f"error {row.tuned:.1e}",
            row.tuned <= max(MARGIN * row.stock, FLOOR[row.dtype]),
        )
    yield from _packing(machine.device)


def _packing(device: Any) -> Iterator[Check]:
    import torch

    from vllm_moe_tune_plugin.kernels.pack_topk import pack_topk

    ids = torch.randint(-1, 512, (257, 8), device=device)
    weights = torch.rand(257, 8, device=device)
    expected = (ids.to(torch.int32) << 16) | weights.to(torch.bfloat16).view(torch.int16)
    equal = torch.equal(pack_topk(ids, weights), expected)
    yield Check("expert ids packed in one launch", "tuple_routing", "torch", "same bits" if equal else "other bits", equal)


# ---- FlashInfer

EXPERTS, TOP_K, INNER, HIDDEN, TOKENS = 8, 2, 256, 256, 3
MAX_NUM_TOKENS, DP_SIZE = 3000, 4


def _flashinfer() -> Iterator[Check]:
    from vllm_moe_tune_plugin import no_gpu
    from vllm_moe_tune_plugin.tunings import autotune_bucket, int32_ids, tuple_routing

    no_gpu.prepare()
    no_gpu.stand_in_platform((10, 0))
    register()
    session = plugin.session()
    assert session is not None
    for module in dict.fromkeys(name for own in session.patches.values() for patch in own for name in patch.modules):
        if exists(module):
            with contextlib.suppress(ImportError):  # then its patches stay pending, and are not run
                importlib.import_module(module)
    no_gpu.activate()
    calls = no_gpu.record_flashinfer()
    fused_moe = importlib.import_module("flashinfer.fused_moe")
    states = {patch.target: patch.state for own in session.patches.values() for patch in own if not patch.serves}

    yield from _buckets(fused_moe, calls, states, autotune_bucket)
    yield from _routing(fused_moe, calls, states, tuple_routing)
    yield from _casts(states, int32_ids)


def _buckets(fused_moe: Any, calls: list[Any], states: dict[str, State], autotune_bucket: Any) -> Iterator[Check]:
    config = _learn_a_config()
    powers_of_two = tactics.tunes_powers_of_two_only()
    for kernel in autotune_bucket.KERNELS:
        if states.get(f"flashinfer.fused_moe:{kernel}") is not State.APPLIED:
            continue
        function = getattr(fused_moe, kernel)
        estimate = config if kernel != tactics.CUTLASS else tactics.FLOOR
        expected = autotune_bucket.bucket(None, estimate, None, powers_of_two)
        seen = {}
        for name, call in (("stock", inspect.unwrap(function)), ("tuned", function)):
            _forget_bounds()
            call(**_arguments(function, kernel))
            seen[name] = calls[-1].tune_max_num_tokens
        yield Check(
            f"{kernel}: largest bucket for {MAX_NUM_TOKENS} tokens a rank, DP {DP_SIZE}",
            "autotune_bucket",
            f"{seen['stock']} tokens",
            f"{seen['tuned']} tokens",
            seen["tuned"] == expected,
        )


def _learn_a_config() -> int:
    """Have vLLM build a config of MAX_NUM_TOKENS and DP_SIZE; the estimate that must follow from it."""
    import torch

    config = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
    shape = Shape("selftest", EXPERTS, TOP_K, INNER, HIDDEN)
    one_rank = experts.moe_config(config, shape, EXPERTS, 1, "bf16", torch.device("cpu"))
    ranks = dataclasses.replace(one_rank.moe_parallel_config, dp_size=DP_SIZE)
    changes = {"moe_parallel_config": ranks, "max_num_tokens": MAX_NUM_TOKENS}
    settable = {field.name: getattr(one_rank, field.name) for field in dataclasses.fields(one_rank) if field.init}
    type(one_rank)(**{**settable, **changes})
    return MAX_NUM_TOKENS * DP_SIZE


def _forget_bounds() -> None:
    """FlashInfer keeps the first bound of some kernels in a class; forget it, so that calls do not influence each other."""
    core = importlib.import_module("flashinfer.fused_moe.core")
    for function in vars(core).values():
        forget = getattr(function, "cache_clear", None)
        if callable(forget) and "module" in getattr(function, "__name__", ""):
            forget()


def _routing(fused_moe: Any, calls: list[Any], states: dict[str, State], tuple_routing: Any) -> Iterator[Check]:
    import torch

    for name, kernel in tuple_routing.ROUTED.items():
        module = f"{tuple_routing.EXPERTS}.{name}"
        if states.get(f"{module}:{tuple_routing.PACK}") is not State.APPLIED:
            continue
        pack = getattr(sys.modules[module], tuple_routing.PACK)
        ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K), dtype=torch.int64)
        weights = torch.rand(TOKENS, TOP_K)
        packed = (ids.to(torch.int32) << 16) | weights.to(torch.bfloat16).view(torch.int16)
        function = getattr(fused_moe, kernel)
        function(**{**_arguments(function, kernel), "topk_ids": pack(ids, weights)})
        call = calls[-1]
        if call.routing == "unpacked":
            passed = bool(torch.equal(call.ids, ids.to(torch.int32)) and torch.equal(call.weights, weights))
            tuned = "ids int32, weights float32"
        else:
            passed, tuned = bool(torch.equal(call.ids, packed)), "packed, same bits"
        yield Check(f"{name}: what {kernel} gets", "tuple_routing", "packed", tuned if passed else "something else", passed)


def _casts(states: dict[str, State], int32_ids: Any) -> Iterator[Check]:
    import torch

    if not any(states.get(target) is State.APPLIED for target in int32_ids.ENTRIES):
        return
    ids = torch.randint(-1, 1 << 15, (TOKENS, TOP_K))
    for dtype in (torch.int64, torch.int32, torch.int16):
        given = ids.to(dtype)
        cast = int32_ids.as_int32(given)
        passed = cast.dtype == torch.int32 and torch.equal(cast.long(), ids) and (dtype != torch.int32 or cast is given)
        yield Check(f"expert ids in {str(dtype)[6:]}", "int32_ids", str(dtype)[6:], str(cast.dtype)[6:], bool(passed))


def _arguments(function: Callable[..., Any], kernel: str) -> dict[str, Any]:
    """Small arguments for a FlashInfer MoE kernel, of the kinds that its C++ code checks."""
    import torch

    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    wide = 2 * INNER
    bits = 4 if "fp4" in kernel or "int4" in kernel else 8 if "fp8" in kernel else 16
    weight_type = {4: torch.uint8, 8: fp8, 16: bf16}[bits]
    packed = 2 if bits == 4 else 1
    hidden_type = fp8 if bits == 8 else bf16

    def weights(rows: int, columns: int) -> Any:
        return torch.zeros(EXPERTS, rows, columns // packed, dtype=weight_type)

    def scales(rows: int, columns: int) -> Any:
        if "fp8" in kernel:
            return torch.ones(EXPERTS, rows // 128, columns // 128)
        return torch.ones(EXPERTS, rows, columns // 32).to(bf16 if "int4" in kernel else fp8)

    ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K), dtype=torch.int32)
    known: dict[str, Any] = {
        "routing_logits": torch.randn(TOKENS, EXPERTS, dtype=bf16),
        "topk_ids": ids << 16,
        "hidden_states": torch.randn(TOKENS, HIDDEN).to(hidden_type),
        "hidden_states_scale": torch.ones(HIDDEN // 128, TOKENS) if "fp8_block" in kernel else None,
        "gemm1_weights": weights(wide, HIDDEN),
        "gemm2_weights": weights(HIDDEN, INNER),
        "gemm1_weights_scale": scales(wide, HIDDEN),
        "gemm2_weights_scale": scales(HIDDEN, INNER),
        "output1_scales_scalar": torch.ones(EXPERTS),
        "output1_scales_gate_scalar": torch.ones(EXPERTS),
        "output2_scales_scalar": torch.ones(EXPERTS),
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "intermediate_size": INNER,
        "local_expert_offset": 0,
        "local_num_experts": EXPERTS,
        "routing_method_type": 1,
        "use_routing_scales_on_input": False,
        "tile_tokens_dim": 8,
        "enable_pdl": False,
        "input": torch.randn(TOKENS, HIDDEN, dtype=bf16),
        "token_selected_experts": ids,
        "token_final_scales": torch.rand(TOKENS, TOP_K),
        "fc1_expert_weights": torch.zeros(EXPERTS, wide, HIDDEN, dtype=bf16),
        "fc2_expert_weights": torch.zeros(EXPERTS, HIDDEN, INNER, dtype=bf16),
        "output_dtype": bf16,
        "quant_scales": [],
    }
    chosen = ("routing_method_type", "enable_pdl")
    parameters = inspect.signature(function).parameters.values()
    return {one.name: known.get(one.name) for one in parameters if one.default is one.empty or one.name in chosen}


if __name__ == "__main__":
    checks = {"layers": _layers, "flashinfer": _flashinfer}[sys.argv[2]]()
    pathlib.Path(sys.argv[1]).write_text(json.dumps([dataclasses.asdict(check) for check in checks]))
