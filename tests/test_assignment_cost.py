"""assignment_cost: the model's decision, what the measurements say of it, and what vLLM's functions then answer."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import fake_stack
import pytest
import torch
from fake_stack import FUSED_MOE, STACK
from hypothesis import given
from hypothesis import strategies as st

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin import gpu, plugin, tunings
from vllm_moe_tune_plugin.bench.shapes import SHAPES
from vllm_moe_tune_plugin.tunings.assignment_cost import BREAK_EVEN, MOST_TOKENS, is_cheaper_sorted, is_sparse, repeated_bytes

# --- the decision ----------------------------------------------------------------------------------------------------------

EXPERTS = st.integers(1, 1024)
TOKENS, TOP_K = st.integers(0, 64), st.integers(1, 16)
#: Up to ten times what an expert of Mixtral has.
BYTES = st.integers(1, 1 << 32)


@given(st.integers(0, 4096), st.integers(1, 4096))
def test_is_sparse(pairs: int, num_experts: int) -> None:
    assert is_sparse(pairs, num_experts) == (4 * pairs / num_experts <= 1)


@given(st.integers(1, 4096))
def test_the_boundary_is_sparse(pairs: int) -> None:
    assert is_sparse(pairs, 4 * pairs)
    assert not is_sparse(pairs, 4 * pairs - 1)


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (4, 2), (5, 3), (3, 3)])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3])
def test_repeated_bytes_is_the_mean_over_all_routings(num_tokens: int, top_k: int, num_experts: int) -> None:
    choices = list(itertools.combinations(range(num_experts), top_k))
    routings = list(itertools.product(choices, repeat=num_tokens))
    repeated = [num_tokens * top_k - len(set().union(*routing)) for routing in routings]
    expected = 7 * sum(repeated) / len(repeated)
    assert repeated_bytes(num_tokens, top_k, num_experts, 7) == pytest.approx(expected, abs=1e-9)


@given(TOKENS, TOP_K, EXPERTS, BYTES)
def test_more_tokens_and_larger_experts_read_more_again(tokens: int, top_k: int, more: int, size: int) -> None:
    num_experts = top_k + more
    now = repeated_bytes(tokens, top_k, num_experts, size)
    rounding = 1e-9 * size * num_experts
    assert -rounding <= now <= repeated_bytes(tokens + 1, top_k, num_experts, size) + rounding
    assert now <= repeated_bytes(tokens, top_k, num_experts, 2 * size) + rounding


def weights(num_experts: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of so many bytes an expert, a multiple of three, without any memory."""
    w1, w2 = (torch.empty(num_experts, rows, size // 3, dtype=torch.uint8, device="meta") for rows in (2, 1))
    return w1, w2


def ids(tokens: int, top_k: int = 4) -> torch.Tensor:
    return torch.stack([torch.randperm(64)[:top_k] for _ in range(tokens)]).int()


@given(TOP_K, EXPERTS, BYTES)
def test_one_token_reads_nothing_again(top_k: int, more: int, size: int) -> None:
    assert not is_cheaper_sorted(torch.empty(1, top_k, device="meta"), *weights(top_k + more, 3 * size))


@given(st.integers(2, MOST_TOKENS), TOP_K, EXPERTS)
def test_the_boundary_is_at_the_break_even(tokens: int, top_k: int, more: int) -> None:
    num_experts, topk_ids = top_k + more, torch.empty(tokens, top_k, device="meta")
    size = 3 * math.ceil(BREAK_EVEN / repeated_bytes(tokens, top_k, num_experts, 3))
    assert is_cheaper_sorted(topk_ids, *weights(num_experts, size + 3))
    assert not is_cheaper_sorted(topk_ids, *weights(num_experts, size - 3))


def test_only_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(row["key"]["tokens"] for file in FILES for row in file["rows"]) == MOST_TOKENS
    assert is_cheaper_sorted(ids(MOST_TOKENS), *LARGE)
    assert not is_cheaper_sorted(ids(MOST_TOKENS + 1), *LARGE)
    assert is_cheaper_sorted(ids(4), *LARGE)
    monkeypatch.setattr(gpu, "capability", lambda device: (10, 0))
    assert not is_cheaper_sorted(ids(4), *LARGE)


# --- the measurements ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One of the measured rows."""

    name: str
    sorted_us: float
    unsorted_us: float
    #: Whether upstream goes unsorted.
    is_sparse: bool
    expected_bytes: float
    #: By the experts that were drawn.
    measured_bytes: float

    def regret(self, goes_unsorted: bool) -> float:
        """By how much a choice is slower than the better one."""
        return (self.unsorted_us if goes_unsorted else self.sorted_us) / min(self.sorted_us, self.unsorted_us) - 1

    @property
    def stays_unsorted(self) -> bool:
        return self.is_sparse and self.expected_bytes <= BREAK_EVEN


FILES = [json.loads(file.read_text()) for file in sorted(pathlib.Path(__file__).parent.glob("gpu/results/assignment/*.json"))]


def measured() -> Iterator[Row]:
    for file in FILES:
        for row in file["rows"]:
            key, size, took = row["key"], row["expert_bytes"], row["median_us"]
            shape, tokens = SHAPES[key["shape"]], key["tokens"]
            yield Row(
                f"{shape.name} {key['dtype']} M={tokens}",
                took["sorted"],
                took["unsorted"],
                is_sparse(tokens * shape.top_k, shape.num_experts),
                repeated_bytes(tokens, shape.top_k, shape.num_experts, size),
                (tokens * shape.top_k - row["distinct_experts"]) * size,
            )


ROWS = list(measured())


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def test_the_measurements_are_of_all_shapes_on_a_hopper() -> None:
    for environment in (file["environment"] for file in FILES):
        assert (environment["gpu"], environment["vllm"]) == ("NVIDIA H200", "0.33.0")
        assert not environment["commit"].endswith("-dirty")
    assert {row["key"]["shape"] for file in FILES for row in file["rows"]} == set(SHAPES)
    assert len({row.name for row in ROWS}) == len(ROWS) == 128


def test_expected_bytes_are_those_of_the_routings_drawn() -> None:
    far = [row for row in ROWS if abs(row.expected_bytes - row.measured_bytes) > max(4e6, 0.08 * row.measured_bytes)]
    assert not far


def test_where_upstream_goes_unsorted_the_model_is_right_within_2_percent() -> None:
    sparse = [row for row in ROWS if row.is_sparse]
    assert max(row.regret(True) for row in sparse) > 0.07
    assert max(row.regret(row.stays_unsorted) for row in sparse) < 0.02


def test_no_correction_costs_more_than_2_percent() -> None:
    corrected = [row for row in ROWS if row.is_sparse and not row.stays_unsorted]
    assert len(corrected) >= 5
    assert max(row.sorted_us / row.unsorted_us for row in corrected) < 1.02


def test_on_average_the_model_loses_a_fifth_of_what_upstream_does() -> None:
    upstream, model = (mean([row.regret(getattr(row, rule)) for row in ROWS]) for rule in ("is_sparse", "stays_unsorted"))
    assert model < upstream / 5


def test_unsorted_where_upstream_sorts_would_win_nothing() -> None:
    assert [row.name for row in ROWS if not row.is_sparse and row.expected_bytes <= BREAK_EVEN] == [
        "qwen3-30b-a3b fp8-block M=6"
    ]
    faster = [row.name for row in ROWS if not row.is_sparse and row.unsorted_us < row.sorted_us]
    assert faster == ["qwen3.5-35b-a3b fp8-block M=12"]


# --- through vLLM's names --------------------------------------------------------------------------------------------------

#: As in vLLM 0.20 to 0.32, with blocks of pairs in place of a kernel.
UPSTREAM = """
import torch

aligned = []

def moe_align_block_size(topk_ids, block_size, num_experts, expert_map=None, *, ignore_invalid_experts=False):
    aligned.append((block_size, num_experts, expert_map, ignore_invalid_experts))
    flat, blocks, experts = topk_ids.flatten().tolist(), [], []
    for expert in sorted(set(flat)):
        pairs = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        for first in range(0, len(pairs), block_size):
            block = pairs[first : first + block_size]
            blocks += block + [len(flat)] * (block_size - len(block))
            experts.append(expert)
    return torch.tensor(blocks), torch.tensor(experts), torch.tensor([len(blocks)])

def _prepare_expert_assignment(topk_ids, config, num_tokens, top_k_num, global_num_experts, expert_map, *,
                               use_int8_w8a16=False, use_int4_w4a16=False, block_shape=None, ignore_invalid_experts=False):
    if expert_map is None and num_tokens * top_k_num * 4 <= global_num_experts:
        count = topk_ids.numel() * config["BLOCK_SIZE_M"]
        return None, topk_ids.view(-1), torch.full((1,), count, dtype=torch.int32, device=topk_ids.device)
    return moe_align_block_size(
        topk_ids, config["BLOCK_SIZE_M"], global_num_experts, expert_map, ignore_invalid_experts=ignore_invalid_experts
    )

class TritonExperts:
    activation = moe_sum = _apply_router_weight_in_gemm2 = lambda self: None

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
              a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input):
        if output is not None:
            output()
        return _prepare_expert_assignment(
            topk_ids, {"BLOCK_SIZE_M": 2}, *topk_ids.shape, w1.size(0), expert_map, ignore_invalid_experts=activation
        )
"""

ORDER = tuple(name for name in tunings.NAMES if name in ("kept_count", "assignment_cost", "decode_kernel"))
SMALL, LARGE = weights(64, 3 << 10), weights(64, 3 << 26)
#: Four tokens choose 64 * (1 - (1 - 1 / 16) ** 4) = 14.56 experts.
CHEAP, COSTLY = weights(64, 27_000_000), weights(64, 28_200_000)


class Serving(NamedTuple):
    """vLLM's module, with the plugin."""

    module: Any

    def __call__(
        self, topk_ids: torch.Tensor, two: Any, expert_map: Any = None, ignore: bool = False, inside: Any = None
    ) -> Any:
        return self.module.TritonExperts().apply(
            inside, None, *two, None, topk_ids, ignore, -1, expert_map, *[None] * 5, apply_router_weight_on_input=False
        )


Serve = Callable[..., Serving]


@pytest.fixture
def serve(install: Any, monkeypatch: pytest.MonkeyPatch) -> Serve:
    def register(source: str = UPSTREAM, order: tuple[str, ...] = ORDER) -> Serving:
        install({**STACK, f"{FUSED_MOE}.fused_moe": source})
        monkeypatch.setattr(tunings, "NAMES", order)
        vllm_moe_tune_plugin.register()
        return Serving(fake_stack.load(f"{FUSED_MOE}.fused_moe"))

    return register


def experts_of_pairs(answer: Any, pairs: int) -> list[int]:
    """The expert that the kernel would use for each pair; -1 for one that it would leave out."""
    sorted_ids, experts, count = answer
    found = [-1] * pairs
    assert count.item() == 2 * len(experts)
    for place in range(count.item()):
        # Unsorted, the first place of a block is its pair's.
        pair = sorted_ids[place].item() if sorted_ids is not None else place // 2 if place % 2 == 0 else pairs
        if pair < pairs:
            found[pair] = experts[place // 2].item()
    return found


def tuned() -> int:
    """How many calls assignment_cost changed."""
    (record,) = (record for record in plugin.records() if record.name == "assignment_cost")
    return sum(patch.tuned for patch in record.patches)


@pytest.mark.parametrize(
    ("tokens", "two", "is_sorted", "by"),
    [
        (1, LARGE, False, 0),
        (4, SMALL, False, 0),
        (4, CHEAP, False, 0),
        (4, COSTLY, True, 1),
        (2, LARGE, True, 1),
        (5, LARGE, True, 0),
        (5, SMALL, True, 0),
    ],
)
def test_sorted_where_that_is_cheaper(serve: Serve, tokens: int, two: Any, is_sorted: bool, by: int) -> None:
    serving, topk_ids = serve(), ids(tokens)
    answer = serving(topk_ids, two, ignore=True)
    assert (answer[0] is not None) == is_sorted
    assert tuned() == by
    assert experts_of_pairs(answer, topk_ids.numel()) == topk_ids.flatten().tolist()
    assert serving.module.aligned == [(2, 64, None, True)] * is_sorted


def test_with_an_expert_map_it_is_vllms(serve: Serve) -> None:
    serving, expert_map = serve(), torch.arange(64)
    serving(ids(4), LARGE, expert_map)
    assert serving.module.aligned == [(2, 64, expert_map, False)]
    assert tuned() == 0


def test_other_ids_and_other_callers_stay_vllms(serve: Serve) -> None:
    """While TritonExperts.apply is running, and after it."""
    serving, answers = serve(), []

    def prepare() -> None:
        answers.append(serving.module._prepare_expert_assignment(ids(4), {"BLOCK_SIZE_M": 2}, 4, 4, 64, None))

    assert serving(ids(4), LARGE, inside=lambda: (prepare(), answers.append(serving(ids(4), SMALL))))[0] is not None
    prepare()
    assert [answer[0] for answer in answers] == [None] * 3
    assert tuned() == 1


def test_sorting_is_looked_up_at_each_call(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = serve()
    monkeypatch.setattr(serving.module, "moe_align_block_size", lambda *args, **kwargs: "of another plugin")
    assert serving(ids(4), LARGE) == "of another plugin"


@pytest.mark.parametrize("order", itertools.permutations(ORDER))
def test_in_any_order_of_wrappers_each_pair_meets_its_expert(serve: Serve, order: tuple[str, ...]) -> None:
    serving = serve(order=order)
    for two, tokens in itertools.product((SMALL, LARGE, SMALL, LARGE), (1, 2, 4, 5)):
        topk_ids = ids(tokens)
        assert experts_of_pairs(serving(topk_ids, two), topk_ids.numel()) == topk_ids.flatten().tolist()
    assert fake_stack.states() == dict.fromkeys(order, "applied")
    vllm_moe_tune_plugin.unregister()
    names = (vars(serving.module.TritonExperts)["apply"], *vars(serving.module).values())
    assert not [value for value in names if fake_stack.is_wrapper(value)]


def test_a_count_that_was_kept_of_small_experts_is_not_given_to_large_ones(serve: Serve) -> None:
    """So the wrapper is outside of kept_count's, and what decode_kernel takes never meets it."""
    serving = serve()
    assert [serving(ids(4), two)[0] is None for two in (SMALL, SMALL, LARGE, SMALL)] == [True, True, False, True]
    session = plugin.session()
    assert session is not None
    (decode,) = session.patches["decode_kernel"]
    assert vars(serving.module.TritonExperts)["apply"] is decode.wrappers[0]


# --- another vLLM ----------------------------------------------------------------------------------------------------------


def state_of(serve: Serve, *pairs: tuple[str, str]) -> tuple[str, str]:
    source = UPSTREAM
    for old, new in pairs:
        assert old in source
        source = source.replace(old, new)
    serving = serve(source, ("assignment_cost",))
    serving(ids(4), LARGE)
    (record,) = plugin.records()
    assert tuned() == 0
    return str(record.state), record.reason


def test_before_0_20_low_latency_assignment_asks_the_same(serve: Serve) -> None:
    prepares = UPSTREAM[UPSTREAM.index("return _prepare_expert_assignment(") :]
    state = state_of(serve, (prepares, "return moe_align_block_size(topk_ids, 2, 64)"))
    assert state == ("native", "low_latency_assignment asks the same")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("_prepare_expert_assignment", "_assign", "this vLLM assigns experts in another way"),
        ("moe_align_block_size", "align", "this vLLM sorts in another way"),
        ("ignore_invalid_experts=", "ignore=", "takes other arguments: ignore, ignore_invalid_experts"),
        ("block_shape=None", "block_shape=None, pad=0", "takes other arguments: pad"),
    ],
)
def test_a_vllm_that_assigns_in_another_way(serve: Serve, old: str, new: str, reason: str) -> None:
    state, why = state_of(serve, (old, new))
    assert state == "unsupported"
    assert reason in why


@pytest.mark.parametrize(("vendor", "name"), [("hip", "ROCm"), ("xpu", "XPU")])
def test_not_for_other_vendors_gpus(serve: Serve, monkeypatch: pytest.MonkeyPatch, vendor: str, name: str) -> None:
    """Some of which call themselves CUDA devices of Hopper's compute capability."""
    monkeypatch.setattr(torch.version, vendor, "1.0", raising=False)
    assert serve()(ids(4), COSTLY)[0] is None
    states = {record.name: (str(record.state), record.patches[0].reason) for record in plugin.records()}
    assert states == dict.fromkeys(ORDER, ("unsupported", f"written for NVIDIA GPUs, not for {name}"))


FOREIGN = """
import functools

@functools.wraps(_prepare_expert_assignment)
def traced(*args, **kwargs):
    return _stock(*args, **kwargs)

_stock, _prepare_expert_assignment = _prepare_expert_assignment, traced

class TritonExperts:"""


def test_below_another_plugins_wrapper_it_is_unsupported(serve: Serve) -> None:
    state, why = state_of(serve, ("\nclass TritonExperts:", FOREIGN))
    assert (state, why) == (
        "unsupported",
        "_prepare_expert_assignment is not vLLM's own: something else wrapped or replaced it",
    )
