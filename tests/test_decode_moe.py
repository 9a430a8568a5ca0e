"""The decode kernels in Triton's interpreter against a dense float64 reference, and when they are used."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import math
import random
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_tune_plugin import no_gpu
from vllm_moe_tune_plugin.bench.shapes import Shape
from vllm_moe_tune_plugin.expert_load import repeated_bytes
from vllm_moe_tune_plugin.kernels import scales
from vllm_moe_tune_plugin.patching import Patch
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.tuned_tiles import Problem
from vllm_moe_tune_plugin.tunings import decode_kernel
from vllm_moe_tune_plugin.tunings.decode_kernel import ACTIVATIONS, LARGE, SMALL, Call, reach, why_stock, window

KERNELS = "vllm_moe_tune_plugin.kernels.decode_moe"
ALPHA, LIMIT = 1.702, 7.0
#: One rounding of the activated row, and one of the result.
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def kernels() -> Any:
    package, _, name = KERNELS.rpartition(".")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        # By both of its names: where there is a GPU, later tests compile the kernels for it.
        patched.delitem(sys.modules, KERNELS, raising=False)
        patched.delattr(f"{package}.{name}", raising=False)
        module = importlib.import_module(KERNELS)
        no_gpu.repair_interpreter()
        yield module
        sys.modules.pop(KERNELS, None)
        vars(sys.modules[package]).pop(name, None)


def activate(name: str, rows: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if name == "relu2_no_mul":
        return F.relu(rows) ** 2
    gate, up = (rows[::2], rows[1::2]) if interleaved else rows.chunk(2)
    if name == "swigluoai":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
    return {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[name](gate) * up


def reference(problem: SimpleNamespace) -> torch.Tensor:
    out = torch.zeros(problem.x.shape[0], problem.w2.shape[1], dtype=torch.float64)
    for token, row in enumerate(problem.ids.tolist()):
        for slot, expert in enumerate(row):
            local = expert if expert < 0 or problem.expert_map is None else int(problem.expert_map[expert])
            if local < 0:
                continue
            hidden = problem.w1[local].double() @ problem.x[token].double()
            if problem.b1 is not None:
                hidden = hidden + problem.b1[local].double()
            result = problem.w2[local].double() @ activate(problem.activation, hidden, problem.interleaved)
            if problem.b2 is not None:
                result = result + problem.b2[local].double()
            out[token] += float(problem.weights[token, slot]) * result
    return out


def draw(
    tokens: int,
    hidden: int,
    inner: int,
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    experts: int = 6,
    top_k: int = 2,
    gap: int = 0,
    biased: bool = False,
    mapped: bool = False,
    absent: float = 0.0,
) -> SimpleNamespace:
    """A random problem. ``gap``: elements between the rows of the weights; ``absent``: how many ids are -1."""
    rows = inner * (1 if activation == "relu2_no_mul" else 2)

    def matrix(height: int, width: int) -> torch.Tensor:
        whole = torch.full((experts, height, width + gap), float("nan"))
        whole[..., :width] = torch.randn(experts, height, width) * width**-0.5
        return whole.to(dtype)[..., :width]

    expert_map, known = None, experts
    if mapped:
        known = 2 * experts
        expert_map = torch.full((known,), -1, dtype=torch.int32)
        expert_map[torch.randperm(known)[:experts]] = torch.arange(experts, dtype=torch.int32)
    ids = torch.stack([torch.randperm(known)[:top_k] for _ in range(tokens)]) if tokens else torch.zeros(0, top_k)
    ids = torch.where(torch.rand(tokens, top_k) < absent, -1, ids)
    return SimpleNamespace(
        x=torch.randn(tokens, hidden).to(dtype),
        w1=matrix(rows, hidden),
        w2=matrix(hidden, inner),
        b1=torch.randn(experts, rows).to(dtype) if biased else None,
        b2=torch.randn(experts, hidden).to(dtype) if biased else None,
        ids=ids.to(random.choice([torch.int32, torch.int64])),
        weights=torch.rand(tokens, top_k),
        expert_map=expert_map,
        activation=activation,
        interleaved=ACTIVATIONS[activation][1],
    )


def run(kernels: Any, problem: SimpleNamespace, tiles: Any = None, device: str = "cpu", pdl: bool = False) -> torch.Tensor:
    def put(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    tokens, hidden = problem.x.shape[0], problem.w2.shape[1]
    out = torch.full((tokens, hidden), float("nan"), dtype=problem.x.dtype, device=device)
    scratch = torch.full((problem.ids.numel() * problem.w2.shape[2],), float("nan"), dtype=problem.x.dtype, device=device)
    kernels.decode_moe(
        out,
        put(problem.x),
        put(problem.w1),
        put(problem.w2),
        put(problem.weights),
        put(problem.ids),
        scratch,
        activation=problem.activation,
        expert_map=put(problem.expert_map),
        w1_bias=put(problem.b1),
        w2_bias=put(problem.b2),
        interleaved=problem.interleaved,
        alpha=ALPHA,
        limit=LIMIT,
        pdl=pdl,
        tiles=tiles,
    )
    return out.cpu()


def coarse(kernels: Any, hidden: int, inner: int, weight_bytes: int, top_k: int = 2) -> Any:
    """The formula's columns with more rows, which the interpreter is faster with."""
    return no_gpu.with_more_rows(kernels.choose_tiles(hidden, inner, top_k, weight_bytes, 1, 132))


def check(kernels: Any, problem: SimpleNamespace, tiles: Any = None) -> None:
    expected = reference(problem)
    error = (run(kernels, problem, tiles).double() - expected).norm()
    assert error <= ALLOWED[problem.x.dtype] * max(float(expected.norm()), 1e-3)


@pytest.mark.parametrize("tokens", range(10))
def test_tokens(kernels: Any, tokens: int) -> None:
    check(kernels, draw(tokens, hidden=48, inner=32), coarse(kernels, 48, 32, 4) if tokens > 4 else None)


@pytest.mark.parametrize(("hidden", "inner"), [(1, 1), (31, 17), (65, 33), (130, 70), (600, 40), (40, 300), (1100, 31)])
def test_sizes_that_are_no_multiples_of_a_tile(kernels: Any, hidden: int, inner: int) -> None:
    check(kernels, draw(2, hidden, inner), coarse(kernels, hidden, inner, 4))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_activations(kernels: Any, activation: str, biased: bool) -> None:
    check(kernels, draw(2, 40, 24, activation, biased=biased))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types(kernels: Any, dtype: torch.dtype) -> None:
    check(kernels, draw(3, 96, 64, dtype=dtype))


def run_fp8(
    kernels: Any,
    hidden: int,
    inner: int,
    block: list[int] | None,
    channels: bool,
    device: str = "cpu",
    pdl: bool = False,
    allowed: float = 1e-5,
    tiles: Any = None,
    **drawn: Any,
) -> None:
    """Against float64 over what the fp8 numbers and their scales stand for."""

    def put(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    problem = draw(3, hidden, inner, **drawn)
    experts = problem.w1.shape[0]

    def quantize(numbers: torch.Tensor) -> torch.Tensor:
        return (numbers.nan_to_num() * 40).clamp(-448, 448).to(torch.float8_e4m3fn)

    def weight_scale(weight: torch.Tensor) -> torch.Tensor:
        _, height, width = weight.shape
        if block is not None:
            return torch.rand(experts, -(-height // block[0]), -(-width // block[1])) + 0.5
        return torch.rand(experts, height, 1) + 0.5 if channels else torch.rand(experts) + 0.5

    def dense(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if block is not None:
            spread = scale.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
            return weight.double() * spread[:, : weight.shape[1], : weight.shape[2]]
        return weight.double() * scale.view(experts, -1, 1)

    x, w1, w2 = quantize(problem.x), quantize(problem.w1), quantize(problem.w2)
    s1, s2 = weight_scale(w1), weight_scale(w2)
    if block is not None:
        sx = (torch.rand(-(-hidden // block[1]), 3) + 0.5).t()  # groups of a token do not lie side by side
        wide = sx.repeat_interleave(block[1], 1)[:, :hidden]
    else:
        sx = torch.rand(3, 1) + 0.5 if channels else torch.rand(1) + 0.5
        wide = sx.view(-1, 1)
    out = torch.full((3, hidden), float("nan"), device=device)
    kernels.decode_moe(
        out,
        put(x),
        put(w1),
        put(w2),
        put(problem.weights),
        put(problem.ids),
        torch.full((problem.ids.numel() * inner,), float("nan"), device=device),
        activation=problem.activation,
        expert_map=put(problem.expert_map),
        x_scale=scales.of_input(put(sx), 3, hidden, block),
        w1_scale=scales.of_weight(put(s1), w1, block),
        w2_scale=scales.of_weight(put(s2), w2, block),
        w1_bias=put(problem.b1),
        w2_bias=put(problem.b2),
        interleaved=problem.interleaved,
        alpha=ALPHA,
        limit=LIMIT,
        pdl=pdl,
        tiles=tiles,
    )
    problem.x, problem.w1, problem.w2 = x.double() * wide, dense(w1, s1), dense(w2, s2)
    expected = reference(problem)
    assert (out.cpu().double() - expected).norm() <= allowed * expected.norm()


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(48, 32), (80, 144)])
def test_fp8_scaled_by_tensor_and_channel(kernels: Any, hidden: int, inner: int, channels: bool) -> None:
    run_fp8(kernels, hidden, inner, None, channels, absent=0.2)


@pytest.mark.parametrize("block", [[128, 128], [32, 16]])
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (96, 48), (1152, 144)])
def test_fp8_scaled_in_blocks(kernels: Any, hidden: int, inner: int, block: list[int]) -> None:
    run_fp8(kernels, hidden, inner, block, False, tiles=coarse(kernels, hidden, inner, 1), mapped=True, absent=0.2)


def test_fp8_with_biases_and_rows_in_turn(kernels: Any) -> None:
    run_fp8(kernels, 64, 32, [32, 16], False, activation="swigluoai", biased=True)


def test_more_scales_than_are_kept_in_registers(kernels: Any) -> None:
    tiles = kernels.Tiles(16, 32, 1, 16, 16, 1, 3)
    inner = 16 * (kernels.MOST_SCALES_AHEAD // 10 + 2)  # a column of tiles for each ten scales, and one more
    run_fp8(kernels, 32, inner, [32, 16], False, tiles=tiles, experts=12, top_k=10)


def test_router_weights_that_the_input_has_already(kernels: Any) -> None:
    problem = draw(3, 40, 24)
    problem.weights = torch.ones_like(problem.weights)
    expected = reference(problem)
    problem.weights = None
    assert (run(kernels, problem).double() - expected).norm() <= 1e-6 * expected.norm()


def test_rows_with_gaps(kernels: Any) -> None:
    check(kernels, draw(3, 40, 24, gap=8))


def test_the_weight_of_a_pair_without_an_expert_is_not_read(kernels: Any) -> None:
    problem = draw(4, 40, 24, absent=0.5)
    problem.ids[0, 0] = -1
    expected = reference(problem)
    problem.weights = problem.weights.masked_fill(problem.ids < 0, math.nan)
    assert (run(kernels, problem).double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("absent", [0.5, 1.0])
@pytest.mark.parametrize("mapped", [False, True])
def test_ids_without_a_local_expert_add_nothing(kernels: Any, mapped: bool, absent: float) -> None:
    check(kernels, draw(4, 40, 24, mapped=mapped, absent=absent, biased=True))


def test_an_expert_map_alone(kernels: Any) -> None:
    check(kernels, draw(5, 40, 24, mapped=True))


@pytest.mark.parametrize("local", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_a_ranks_share_of_the_pairs_may_be_any(kernels: Any, tokens: int, local: int) -> None:
    """The first kernel has programs for a quarter of the pairs here: they share out as many as there are, up to all."""
    problem = draw(tokens, 40, 24, experts=4, top_k=3)
    problem.expert_map = torch.full((16,), -1, dtype=torch.int32)
    problem.expert_map[torch.randperm(16)[:4]] = torch.randperm(4, dtype=torch.int32)
    here, elsewhere = ((problem.expert_map >= 0) == own for own in (True, False))
    rows = []
    for _ in range(tokens):
        mine, others = (which.nonzero().flatten() for which in (here, elsewhere))
        chosen = torch.cat([mine[torch.randperm(4)[:local]], others[torch.randperm(12)[: 3 - local]]])
        rows.append(chosen[torch.randperm(3)])
    problem.ids = torch.stack(rows).to(problem.ids.dtype)
    check(kernels, problem)


def test_many_experts_for_one_token(kernels: Any) -> None:
    check(kernels, draw(1, 32, 520, experts=12, top_k=10), coarse(kernels, 32, 520, 4, top_k=10))


@pytest.mark.parametrize("ahead", [0, 1, 3, 4])
def test_tiles_loaded_ahead_change_nothing(kernels: Any, ahead: int) -> None:
    problem = draw(2, 40, 48, absent=0.3)
    tiles = kernels.Tiles(2, 16, 1, 2, 32, 1, ahead)
    check(kernels, problem, tiles)
    assert torch.equal(run(kernels, problem, tiles), run(kernels, problem, tiles))


def test_no_more_tiles_are_loaded_ahead_than_a_token_has(kernels: Any) -> None:
    """What lies behind the last token's ids names experts that no memory holds: reading by it ends the process."""
    problem = draw(2, 40, 48)
    behind = torch.full((64,), 1 << 40)
    behind[: problem.ids.numel()] = problem.ids.flatten()
    problem.ids = behind[: problem.ids.numel()].view(2, -1)
    check(kernels, problem, kernels.Tiles(2, 16, 1, 2, 32, 1, 64))


FORMULA = (st.integers(1, 16384), st.integers(1, 16384), st.integers(1, 16), st.sampled_from([1, 2, 4]))


@pytest.fixture(scope="module")
def by_formula(kernels: Any) -> Any:
    return kernels.choose_tiles


@given(*FORMULA, st.integers(1, 16), st.sampled_from([78, 132]), st.none() | st.integers(1, 256))
def test_tiles_by_formula_fit(
    by_formula: Any, hidden: int, inner: int, top_k: int, weight_bytes: int, tokens: int, sms: int, expected: int | None
) -> None:
    tiles = by_formula(hidden, inner, top_k, weight_bytes, tokens, sms, expected)
    for columns, warps in ((tiles.up_columns, tiles.up_warps), (tiles.down_columns, tiles.down_warps)):
        assert columns & (columns - 1) == 0
        assert warps in (1, 2, 4, 8)
    parts = -(-inner // tiles.down_columns)
    assert top_k * parts <= max(64, top_k)
    assert 1 <= tiles.down_ahead <= top_k * parts


@given(*FORMULA, st.integers(1, 16))
def test_the_number_of_tokens_changes_no_sum(
    by_formula: Any, hidden: int, inner: int, top_k: int, weight_bytes: int, tokens: int
) -> None:
    """What a token gets does not depend on the others, nor on the GPU: only how far ahead weights are loaded does."""
    one, few = (by_formula(hidden, inner, top_k, weight_bytes, *more) for more in ((1, 132), (tokens, 78)))
    assert dataclasses.replace(one, down_ahead=few.down_ahead) == few
    assert few.down_ahead <= one.down_ahead


@given(*FORMULA, st.integers(1, 16), st.integers(1, 256))
def test_nor_does_it_on_one_of_many_ranks(
    by_formula: Any, hidden: int, inner: int, top_k: int, weight_bytes: int, tokens: int, expected: int
) -> None:
    """There rows follow the tokens as well, each of which is a sum of its own."""
    one, few = (by_formula(hidden, inner, top_k, weight_bytes, *more) for more in ((1, 132, 1), (tokens, 78, expected)))
    rows = {"up_rows": few.up_rows, "down_rows": few.down_rows}
    assert dataclasses.replace(one, down_ahead=few.down_ahead, **rows) == few


# --- when


def layers(dtypes: tuple[str, ...], ranks: tuple[int, ...]) -> st.SearchStrategy[Problem]:
    """Layers of which each rank holds as many experts as the others."""
    return st.builds(
        lambda local, ranks, top_k, dtype: Problem(local * ranks, local, min(top_k, local * ranks), 512, 2048, dtype),
        st.integers(1, 512),
        st.sampled_from(ranks),
        st.integers(1, 32),
        st.sampled_from(dtypes),
    )


@given(layers(("bf16", "fp8", "fp8-block"), (1,)), st.integers(1, 1 << 30))
def test_window(layer: Problem, expert_bytes: int) -> None:
    tokens = window(layer, expert_bytes)
    assert 0 <= tokens <= max(SMALL[1], LARGE[1])
    assert tokens * layer.top_k * 2 <= layer.num_experts
    twice = dataclasses.replace(layer, num_experts=2 * layer.num_experts, local_experts=2 * layer.local_experts)
    assert window(layer, expert_bytes + 1) <= tokens <= window(twice, expert_bytes)


@given(layers(("bf16", "fp8", "fp8-block"), (2, 3, 4, 8, 64)), st.integers(1, 1 << 30))
def test_window_of_one_of_many_ranks(layer: Problem, expert_bytes: int) -> None:
    """Smaller experts and more ranks never narrow it, and in bf16 no rank reads more again than the budget."""
    tokens = window(layer, expert_bytes)
    assert 0 <= tokens <= SMALL[1]
    assert window(layer, expert_bytes + 1) <= tokens
    more = dataclasses.replace(layer, local_experts=max(1, layer.local_experts // 2))
    assert tokens <= window(more, expert_bytes)
    if layer.dtype == "bf16" and tokens:
        ranks = layer.num_experts // layer.local_experts
        assert repeated_bytes(tokens, layer.top_k, layer.num_experts, expert_bytes) <= decode_kernel.BUDGET * ranks


@given(st.integers(2, 512), st.integers(1, 16), st.integers(2, 16), st.integers(1, 1 << 30))
def test_ranks_with_one_expert_more_decide_alike(experts: int, top_k: int, ranks: int, expert_bytes: int) -> None:
    """Where experts do not divide evenly; with a handful on each rank the share itself would say another number of ranks."""
    least = experts // ranks
    top_k = min(top_k, experts)
    if least > ranks:
        few, more = (Problem(experts, local, top_k, 512, 2048, "bf16") for local in (least, least + bool(experts % ranks)))
        assert window(few, expert_bytes) == window(more, expert_bytes)


@pytest.mark.parametrize(
    ("experts", "top_k", "inner", "hidden", "tokens"),
    [
        (128, 8, 768, 2048, 8),
        (512, 10, 512, 2048, 16),
        (256, 8, 256, 7168, 16),
        (128, 4, 2880, 2880, 8),
        (32, 4, 2880, 2880, 2),
        (8, 2, 14336, 4096, 1),
        (128, 1, 1024, 5120, 8),
        (128, 8, 1408, 4096, 4),
    ],
    ids=["qwen3-30b", "qwen3-next", "deepseek-v3-tp8", "gpt-oss-120b", "gpt-oss-20b", "mixtral", "llama-4-tp8", "glm-4.5-air"],
)
def test_window_of_known_shapes(experts: int, top_k: int, inner: int, hidden: int, tokens: int) -> None:
    """As measured: at each of these it won, at twice as many it lost or was not measured."""
    assert window(Problem(experts, experts, top_k, inner, hidden, "bf16"), 3 * inner * hidden * 2) == tokens


def with_experts_elsewhere() -> list[Any]:
    file = Path(__file__).parent / "gpu" / "results" / "expert-parallel" / "layer-0.33.0-all-tokens.json"
    return [row for row in json.loads(file.read_text())["rows"] if row["status"] == "ok"]


def test_what_was_measured_with_experts_elsewhere() -> None:
    rows = with_experts_elsewhere()
    assert {row["key"]["ep"] for row in rows} == {2, 4, 8}
    assert {row["key"]["tokens"] for row in rows} == {1, 2, 4, 8, 16}
    assert len(rows) == 11 * 3 * 5  # six models in bf16, five in fp8


@pytest.mark.parametrize("row", with_experts_elsewhere(), ids=lambda row: "-".join(map(str, row["key"].values())))
def test_with_experts_elsewhere_it_serves_where_it_won(row: dict[str, Any]) -> None:
    key, shape = row["key"], Shape.parse(row["key"]["shape"])
    expert_bytes = shape.expert_bytes(key["dtype"])
    tokens = window(Problem.of(shape, key["dtype"], key["ep"]), expert_bytes)
    if key["tokens"] <= tokens:
        assert row["ratio_ci95"][0] > 1.02
    else:
        assert row["ratio"] < 1.07


class Experts:
    """An object as ``TritonExperts`` is where all conditions are met."""

    def __init__(self) -> None:
        self.quant_config = SimpleNamespace(
            quant_dtype=None,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            w1_scale=None,
            w2_scale=None,
            w1_bias=None,
            w2_bias=None,
            gemm1_clamp_limit=None,
        )
        self.block_shape = None
        parallel = SimpleNamespace(use_all2all_kernels=False, all2all_backend="allgather_reducescatter")
        self.moe_config = SimpleNamespace(swiglu_limit=None, moe_parallel_config=parallel)


class OtherExperts(Experts):
    pass


def call(**changes: Any) -> Call:
    problem = draw(2, hidden=32, inner=16, dtype=torch.bfloat16)
    arguments = {
        "output": torch.empty(2, 32, dtype=torch.bfloat16),
        "hidden_states": problem.x,
        "w1": problem.w1,
        "w2": problem.w2,
        "topk_weights": problem.weights,
        "topk_ids": problem.ids,
        "activation": "silu",
        "expert_map": None,
        "a1q_scale": None,
        "workspace2": torch.empty(2, 2, 64, dtype=torch.bfloat16),
        "apply_router_weight_on_input": False,
    }
    return Call(**{**arguments, **changes})


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernel, "runs_triton", lambda tensor: True)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)


def changed(name: str, value: Any, of: str = "") -> Experts:
    experts = Experts()
    setattr(getattr(experts, of) if of else experts, name, value)
    return experts


@pytest.mark.parametrize("changes", [{}, {"apply_router_weight_on_input": True}, {"expert_map": torch.arange(6)}])
def test_all_conditions_met(on_gpu: None, changes: dict[str, Any]) -> None:
    assert why_stock(Experts(), call(**changes), Experts) == ""


def fp8_call(experts: Experts, w1_scale: Any, w2_scale: Any, a1q_scale: Any, block: list[int] | None = None) -> Call:
    """2 tokens, 6 experts, K 32, N 16; the experts' configuration is set as well."""
    experts.quant_config.quant_dtype = torch.float8_e4m3fn
    experts.quant_config.w1_scale, experts.quant_config.w2_scale, experts.block_shape = w1_scale, w2_scale, block
    plain = call()
    quantized = {name: getattr(plain, name).to(torch.float8_e4m3fn) for name in ("hidden_states", "w1", "w2")}
    return call(**quantized, a1q_scale=a1q_scale)


ONE_EACH = (torch.ones(6), torch.ones(6), torch.ones(1))
CHANNELS = (torch.ones(6, 32, 1), torch.ones(6, 32, 1), torch.ones(2, 1))
BLOCKS = (torch.ones(6, 1, 2), torch.ones(6, 1, 1), torch.ones(2, 2), [32, 16])


@pytest.mark.parametrize("given", [ONE_EACH, CHANNELS, BLOCKS], ids=["tensor", "channel", "block"])
def test_fp8_with_known_scales(on_gpu: None, given: tuple[Any, ...]) -> None:
    experts = Experts()
    assert why_stock(experts, fp8_call(experts, *given), Experts) == ""


@pytest.mark.parametrize(
    "given",
    [
        (None, torch.ones(6), torch.ones(1)),
        (torch.ones(6), torch.ones(6), None),
        (torch.ones(6, dtype=torch.float64), torch.ones(6), torch.ones(1)),
        (torch.ones(5), torch.ones(6), torch.ones(1)),
        (torch.ones(6), torch.ones(6), torch.ones(3, 1)),
        (torch.ones(6, 32, 1), torch.ones(6, 16, 1), torch.ones(2, 1)),
        (torch.ones(6, 4, 4), torch.ones(6, 4, 2), torch.ones(2, 4), [8, 8]),
        (torch.ones(6, 2, 2), torch.ones(6, 2, 1), torch.ones(2, 2), [16, 16]),  # a program may have 32 rows
        (torch.ones(6, 1, 2), torch.ones(6, 1, 1), torch.ones(2, 1), [32, 16]),
        (torch.ones(6, 1, 2, dtype=torch.uint8), torch.ones(6, 1, 1), torch.ones(2, 2), [32, 16]),
    ],
)
def test_fp8_with_other_scales_stays_stock(on_gpu: None, given: tuple[Any, ...]) -> None:
    experts = Experts()
    assert why_stock(experts, fp8_call(experts, *given), Experts) == "scales of another kind"


@pytest.mark.parametrize(
    "experts",
    [
        OtherExperts(),
        changed("activation", print),
        changed("moe_sum", print),
        changed("_lora_context", object()),
        changed("_uses_post_gemm2_hook", lambda tokens: True),
        changed("quantization_emulation", True),
        changed("quant_dtype", torch.float8_e4m3fn, "quant_config"),
        changed("use_int4_w4a16", True, "quant_config"),
        changed("w1_scale", torch.ones(1), "quant_config"),
        changed("gemm1_clamp_limit", 7.0, "quant_config"),
        changed("swiglu_limit", 7.0, "moe_config"),
        changed("w1_bias", torch.zeros(6, 64)[:, ::2], "quant_config"),
    ],
)
def test_experts_of_another_kind_stay_stock(on_gpu: None, experts: Experts) -> None:
    assert why_stock(experts, call(), Experts)


SHARED = torch.zeros(192, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "swiglustep"},
        {"activation": SimpleNamespace(value="situ")},
        {"a1q_scale": torch.ones(1)},
        {"w1": torch.zeros(6, 32, 32)},
        {"w1": torch.zeros(6, 16, 32, dtype=torch.bfloat16)},
        {"w1": torch.zeros(6, 32, 36, dtype=torch.bfloat16)[..., :32]},
        {"w2": torch.zeros(6, 16, 32, dtype=torch.bfloat16).transpose(1, 2)},
        {"hidden_states": torch.zeros(2, 32)},
        {"topk_ids": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]},
        {"topk_weights": torch.zeros(2, 2, dtype=torch.int32)},
        {"output": torch.zeros(32, 2, dtype=torch.bfloat16).t()},
        {"workspace2": torch.zeros(63, dtype=torch.bfloat16)},
        {"workspace2": torch.zeros(64, dtype=torch.uint8)},
        {"output": SHARED[:64].view(2, 32), "workspace2": SHARED[32:]},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_calls_of_another_kind_stay_stock(on_gpu: None, changes: dict[str, Any]) -> None:
    assert why_stock(Experts(), call(**changes), Experts)


def patch_of(
    monkeypatch: pytest.MonkeyPatch,
    apply: Any,
    more: str = "a2_scale",
    moe_sum: Any = lambda self: None,
    **settings: Any,
) -> tuple[Patch, type]:
    """The patch on an ``apply`` with vLLM's parameters and one more, attempted, and the class that it is on."""
    names = ("self", *decode_kernel._PARAMETERS, more)
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    apply.__signature__ = inspect.Signature(parameters)
    module = types.ModuleType("module")
    steps = {"apply": apply, "activation": lambda self: None, "moe_sum": moe_sum}
    module.TritonExperts = type("TritonExperts", (Experts,), steps)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "module", module)
    target = "module:TritonExperts.apply"
    patch = Patch(target, decode_kernel._decide(target, Settings(**settings)))
    patch.attempt()
    return patch, module.TritonExperts


@pytest.mark.parametrize(("value", "state"), [("1", "unsupported"), ("0", "applied"), (None, "applied")])
def test_batch_invariance_keeps_it_off(monkeypatch: pytest.MonkeyPatch, value: str | None, state: str) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    patch, _ = patch_of(monkeypatch, lambda self, **arguments: None)
    assert patch.state == state
    assert patch.undo()


@pytest.fixture
def served(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call that went to the kernels, which are not run."""
    tokens: list[int] = []
    monkeypatch.setattr(decode_kernel, "_run", lambda experts, call, found: tokens.append(call.topk_ids.size(0)))
    return tokens


def stock_apply(self: Any, **arguments: Any) -> str:
    return "stock"


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_up_to_the_window_the_kernels_serve(served: list[int], monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    _, experts_class = patch_of(monkeypatch, stock_apply, decode_tokens=2)
    changes = {name: getattr(call(), name)[:1].expand(tokens, -1).contiguous() for name in ("topk_ids", "topk_weights")}
    changes["hidden_states"] = torch.zeros(tokens, 32, dtype=torch.bfloat16)
    assert experts_class().apply(**call(**changes)._asdict()) == (None if tokens < 3 else "stock")
    assert served == [tokens] * (tokens < 3)


@pytest.mark.parametrize("setting", [None, 2])
@pytest.mark.parametrize(
    ("backend", "all2all", "serves"),
    [
        ("allgather_reducescatter", True, True),
        ("naive", True, True),
        ("deepep_high_throughput", True, False),
        ("one of a later vLLM", True, False),
        ("deepep_high_throughput", False, True),  # one data-parallel rank: nothing is brought
        (None, True, False),
    ],
)
def test_with_experts_elsewhere_a_rank_must_get_all_tokens(
    served: list[int], monkeypatch: pytest.MonkeyPatch, backend: str | None, all2all: bool, serves: bool, setting: int | None
) -> None:
    """Else the window says nothing about it, unless the user does."""
    monkeypatch.setattr(decode_kernel.tuned_tiles, "look_up", lambda *_: None)
    _, experts_class = patch_of(monkeypatch, stock_apply, decode_tokens=setting)
    experts = experts_class()
    parallel = None if backend is None else SimpleNamespace(use_all2all_kernels=all2all, all2all_backend=backend)
    experts.moe_config.moe_parallel_config = parallel
    expert_map = torch.arange(12, dtype=torch.int32) % 7 - 1
    names = ("output", "hidden_states", "topk_ids", "topk_weights")
    one_token = {name: getattr(call(), name)[:1].contiguous() for name in names}
    for shared in (True, False):
        stock = shared and not serves and setting is None
        arguments = call(**one_token, expert_map=expert_map if shared else None)._asdict()
        assert experts.apply(**arguments) == ("stock" if stock else None)


def test_a_parameter_that_is_not_known_may_mean_anything(monkeypatch: pytest.MonkeyPatch, on_gpu: None) -> None:
    patch, _ = patch_of(monkeypatch, stock_apply, more="routed_scaling_factor")
    assert (patch.state, "routed_scaling_factor" in patch.reason) == ("unsupported", True)


def foreign_wrapper(self: Any, **arguments: Any) -> Any:
    return stock_apply(self, **arguments)


functools.update_wrapper(foreign_wrapper, stock_apply)


def foreign_replacement(self: Any, **arguments: Any) -> Any:
    return None


foreign_replacement.__module__ = "another_plugin.patches"


@pytest.mark.parametrize("foreign", [foreign_wrapper, foreign_replacement])
@pytest.mark.parametrize("name", ["apply", "moe_sum"])
def test_what_another_plugin_did_before_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, on_gpu: None, name: str, foreign: Any
) -> None:
    steps = {"apply": stock_apply, name: foreign}
    patch, _ = patch_of(monkeypatch, **steps)
    assert patch.state == "unsupported"
    assert patch.reason.startswith(f"TritonExperts.{name} is not vLLM's own")


@pytest.mark.parametrize("late", [False, True], ids=["before the first call", "later"])
def test_a_step_replaced_on_the_class_is_not_passed_over(
    served: list[int], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    _, experts_class = patch_of(monkeypatch, stock_apply, decode_tokens=2)
    if late:
        assert experts_class().apply(**call()._asdict()) is None
    monkeypatch.setattr(experts_class, "moe_sum", lambda self: None)
    assert experts_class().apply(**call()._asdict()) == "stock"
    assert len(served) == late


@pytest.mark.parametrize("mark", [*decode_kernel.OFFLOADED, None])
@pytest.mark.parametrize("name", ["w1", "w2"])
def test_weights_on_the_host_stay_stock(
    served: list[int], monkeypatch: pytest.MonkeyPatch, name: str, mark: str | None
) -> None:
    _, experts_class = patch_of(monkeypatch, stock_apply, decode_tokens=2)
    made = call()
    if mark:
        setattr(getattr(made, name), mark, torch.zeros(2))
    assert experts_class().apply(**made._asdict()) == ("stock" if mark else None)


@pytest.mark.parametrize(
    "changes", [{"w1": torch.zeros(6, 32, 8, dtype=torch.uint8)}, {"w1": torch.zeros(6, 8, dtype=torch.bfloat16)}]
)
def test_a_layer_of_another_kind_is_no_failure(
    served: list[int], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    patch, experts_class = patch_of(monkeypatch, stock_apply)
    assert experts_class().apply(**call(**changes)._asdict()) == "stock"
    assert patch.state == "applied"


@pytest.mark.parametrize(("log", "lines"), [("debug", 1), ("info", 0)])
def test_debug_says_once_why_a_layer_stays_stock(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture, log: str, lines: int
) -> None:
    patch, experts_class = patch_of(monkeypatch, lambda self, **arguments: None, log=log, decode_tokens=4)
    for _ in range(2):
        experts_class().apply(**call(activation="tanh")._asdict())
    assert patch.undo()
    assert logged.text.count("decode_kernel leaves a layer stock: activation tanh") == lines


@given(
    st.builds(Problem, *[st.integers(1, 512)] * 2, st.integers(1, 16), *[st.integers(16, 8192)] * 2, st.sampled_from(["bf16"])),
    st.sampled_from([(8, 0), (9, 0), (10, 0)]),
    st.none() | st.integers(0, 16),
    st.none() | st.integers(0, 64),
)
def test_reach(problem: Problem, capability: tuple[int, int], found: int | None, setting: int | None) -> None:
    """The user's word counts first, then what was searched on this GPU, then what was measured on Hopper."""
    entry = None if found is None else SimpleNamespace(tokens=found)
    size = 6 * problem.intermediate * problem.hidden
    tokens, why = reach(problem, size, capability, entry, setting)  # type: ignore[arg-type]
    measured = window(problem, size) if capability == (9, 0) else 0
    assert tokens == next(value for value in (setting, found, measured) if value is not None)
    assert ("MOE_TUNE_DECODE_TOKENS" in why) == (setting is not None)


def test_the_cpu_stays_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernel, "runs_triton", lambda tensor: False)
    assert why_stock(Experts(), call(), Experts) == "not on a GPU"
