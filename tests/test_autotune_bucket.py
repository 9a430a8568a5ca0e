"""autotune_bucket: which value reaches FlashInfer, and that it is never lower than vLLM's but for a launch's limit."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import fake_stack
import pytest
import torch
from fake_stack import EXPERTS, FUSED_MOE
from hypothesis import given
from hypothesis import strategies as st

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin.tunings.autotune_bucket import FLOOR, Estimate, bucket

tokens = st.integers(1, 2**20) | st.sampled_from([FLOOR - 1, FLOOR, FLOOR + 1, 512, 2**15, 2**15 + 1])
estimates = tokens.map(lambda value: max(value, FLOOR))


def is_power_of_two(value: int) -> bool:
    return bin(value).count("1") == 1


@given(st.none() | tokens, estimates)
def test_never_lowered(passed, estimate):
    for powers_of_two in (False, True):
        value = bucket(passed, estimate, None, powers_of_two)
        assert value >= (passed or 0)
        assert value >= estimate
        assert value < 2 * max(passed or 0, estimate)
        if not powers_of_two:
            assert value in (passed, estimate)


@given(st.none() | tokens, estimates, tokens, st.booleans())
def test_lowered_to_the_limit_only(passed, estimate, limit, powers_of_two):
    free = bucket(passed, estimate, None, powers_of_two)
    value = bucket(passed, estimate, limit, powers_of_two)
    assert value <= limit
    if free <= limit:
        assert value == free
    else:
        assert 2 * value > limit if powers_of_two else value == limit


@given(st.none() | tokens, estimates, st.none() | tokens)
def test_powers_of_two_for_an_older_flashinfer(passed, estimate, limit):
    assert is_power_of_two(bucket(passed, estimate, limit, powers_of_two=True))


@given(st.none() | tokens, estimates, st.none() | tokens, st.booleans(), tokens)
def test_monotone(passed, estimate, limit, powers_of_two, more):
    value = bucket(passed, estimate, limit, powers_of_two)
    assert bucket((passed or 0) + more, estimate, limit, powers_of_two) >= value
    assert bucket(passed, estimate + more, limit, powers_of_two) >= value
    if limit is not None:
        assert bucket(passed, estimate, limit + more, powers_of_two) >= value


@given(st.lists(st.tuples(st.integers(1, 2**17), st.integers(1, 64)), min_size=1, max_size=8))
def test_one_estimate_for_all_layers(layers):
    estimate = Estimate()
    assert estimate.tokens is None
    seen = []
    for max_num_tokens, dp_size in layers:
        estimate.learn(max_num_tokens, dp_size)
        seen.append(estimate.tokens)
    assert seen == sorted(seen)
    assert seen[-1] == max(FLOOR, *(count * size for count, size in layers))


# --- through the experts ---------------------------------------------------------------------------------------------------

IDS, WEIGHTS = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)


class Serving:
    """A process that has imported all that serves, with one value for each call of FlashInfer."""

    def __init__(self) -> None:
        vllm_moe_tune_plugin.register()
        fake_stack.load()
        self.calls = importlib.import_module("flashinfer.fused_moe.core").CALLS

    @staticmethod
    def configure(**fields: int) -> None:
        importlib.import_module(f"{FUSED_MOE}.config").FusedMoEConfig(**fields)

    def experts(self, module: str, name: str, *more: int, **attributes: int) -> int:
        """The bucket that one layer's call passes."""
        experts = getattr(importlib.import_module(f"{EXPERTS}.{module}"), name)()
        vars(experts).update(attributes)
        arguments = (IDS,) if "Monolithic" in name else (IDS, WEIGHTS)
        experts.apply(None, *arguments, *more)
        return self.calls[-1][2]

    def routes(self) -> dict[str, int]:
        """The bucket by each way in which vLLM reaches FlashInfer, where nothing limits it."""
        return {
            "attribute": self.experts("trtllm_bf16_moe", "TrtLlmBf16ExpertsModular"),
            "from flashinfer.fused_moe": self.experts("trtllm_fp8_moe", "TrtLlmFp8ExpertsModular"),
            "from flashinfer": self.experts("trtllm_mxfp4_moe", "TrtLlmMxfp4ExpertsModular", 10_000),
            "lazy": self.experts("trtllm_bf16_moe", "TrtLlmBf16ExpertsMonolithic"),
            "NVFP4": self.experts("trtllm_nvfp4_moe", "TrtLlmNvFp4ExpertsModular"),
            "LoRA": self.experts("trtllm_lora_moe", "TrtLlmBf16LoRAExperts"),
        }


def test_every_route_gets_the_estimate(install):
    install()
    serving = Serving()
    serving.configure(max_num_tokens=5000, dp_size=3)
    assert set(serving.routes().values()) == {15000}


def test_nothing_is_known_before_a_layer_is_configured(install):
    install()
    serving = Serving()
    assert set(serving.routes().values()) == {FLOOR, 512}


def test_the_largest_layer_decides_for_all_in_any_order(install):
    install()
    serving = Serving()
    serving.configure(max_num_tokens=10_000, dp_size=2)
    serving.configure(max_num_tokens=100, dp_size=1)
    assert set(serving.routes().values()) == {20_000}


def test_a_new_registration_learns_anew(install):
    install()
    Serving().configure(max_num_tokens=100_000)
    vllm_moe_tune_plugin.unregister()
    serving = Serving()
    serving.configure(max_num_tokens=3000)
    assert set(serving.routes().values()) == {12_000}


def test_elastic_expert_parallelism_counts_its_largest_size(install):
    source = fake_stack.replaced(
        f"{FUSED_MOE}.config",
        ("    dp_size: int = 4\n", "    dp_size: int = 4\n    elastic_ep_max_dp_size: int | None = None\n"),
    )
    install(source)
    serving = Serving()
    serving.configure(max_num_tokens=4000, elastic_ep_max_dp_size=8)
    assert set(serving.routes().values()) == {32_000}


def test_up_to_0_19_the_scheduler_knows_the_tokens(install):
    source = fake_stack.replaced(
        f"{FUSED_MOE}.config", ("@dataclass\n", "def chunk(envs):\n    return envs.VLLM_MOE_DP_CHUNK_SIZE\n\n@dataclass\n")
    )
    install(source)
    serving = Serving()
    serving.configure(max_num_tokens=256, dp_size=4)
    assert set(serving.routes().values()) == {FLOOR}, "without a config in context: the field is all there is"
    scheduler = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=5000))
    importlib.import_module("vllm.config").CURRENT = scheduler
    serving.configure(max_num_tokens=256, dp_size=4)
    assert set(serving.routes().values()) == {20_000}


def test_from_0_20_the_scheduler_is_not_asked(install):
    install()
    serving = Serving()
    importlib.import_module("vllm.config").CURRENT = SimpleNamespace(scheduler_config=None)
    serving.configure(max_num_tokens=5000, dp_size=2)
    assert set(serving.routes().values()) == {10_000}


@pytest.mark.parametrize(("chunk", "expected"), [(9_000, 9_000), (8_000, 8_000), (300_000, 16_384)])
def test_nvfp4_is_bounded_by_its_chunk(install, chunk, expected):
    install()
    serving = Serving()
    serving.configure()
    assert serving.experts("trtllm_nvfp4_moe", "TrtLlmNvFp4ExpertsModular", chunk=chunk) == expected
    assert serving.experts("trtllm_bf16_moe", "TrtLlmBf16ExpertsModular") == 16_384, "no other kernel is bounded by it"


@pytest.mark.parametrize(("num_experts", "expected"), [(18, 9_000), (64, 16_384)])
def test_mxfp4_is_bounded_by_its_supported_tokens(install, num_experts, expected):
    install()
    serving = Serving()
    serving.configure()
    assert serving.experts("trtllm_mxfp4_moe", "TrtLlmMxfp4ExpertsModular", num_experts) == expected


def test_the_bound_is_gone_after_an_exception(install):
    install()
    serving = Serving()
    serving.configure()
    kernel = importlib.import_module("flashinfer.fused_moe").trtllm_fp4_block_scale_routed_moe
    experts = importlib.import_module(f"{EXPERTS}.trtllm_nvfp4_moe").TrtLlmNvFp4ExpertsModular()
    experts.chunk = 100
    with pytest.raises(TypeError):
        experts._invoke_kernel(None, IDS)
    kernel(IDS, None)
    assert serving.calls[-1][2] == 16_384


@pytest.mark.parametrize(("passed", "expected"), [(1, 16_384), (16_384, 16_384), (50_000, 50_000)])
@pytest.mark.parametrize("positional", [False, True])
def test_what_vllm_passes_is_raised_and_never_lowered(install, passed, expected, positional):
    install()
    serving = Serving()
    serving.configure()
    kernel = importlib.import_module("flashinfer").trtllm_fp8_block_scale_routed_moe
    if positional:
        kernel(IDS, None, passed)
    else:
        kernel(IDS, tune_max_num_tokens=passed)
    assert serving.calls[-1] == ("trtllm_fp8_block_scale_routed_moe", IDS, expected)


def test_powers_of_two_with_a_flashinfer_before_0_6_10(install):
    install({**fake_stack.STACK, "flashinfer.fused_moe.utils": ""})
    serving = Serving()
    serving.configure(max_num_tokens=5000, dp_size=2)
    assert set(serving.routes().values()) == {16_384}
    assert serving.experts("trtllm_nvfp4_moe", "TrtLlmNvFp4ExpertsModular", chunk=9_000) == 8_192


@pytest.mark.parametrize(("setting", "expected"), [("0", FLOOR), ("1", 16_384)])
def test_cutlass_gets_the_floor_unless_asked_for_more(install, monkeypatch, setting, expected):
    monkeypatch.setenv("MOE_TUNE_CUTLASS_BUCKET", setting)
    install()
    serving = Serving()
    serving.configure()
    assert serving.experts("flashinfer_cutlass_moe", "FlashInferExperts") == expected
    assert serving.experts("flashinfer_cutlass_moe", "FlashInferExperts", max_capture_size=64) == expected
    most = "max_num_batched_tokens * dp_size" if setting == "1" else FLOOR
    assert f"CUTLASS profiles up to {most} tokens" in fake_stack.patches()["flashinfer.fused_moe:cutlass_fused_moe"].reason
    above = serving.experts("flashinfer_cutlass_moe", "FlashInferExperts", max_capture_size=20_000)
    assert above == (20_000 if setting == "1" else FLOOR), "one value for the family unless the user asks for more"


@pytest.mark.parametrize(("setting", "state"), [("0", "native"), ("1", "applied")])
def test_cutlass_without_a_bucket_from_vllm(install, monkeypatch, setting, state):
    monkeypatch.setenv("MOE_TUNE_CUTLASS_BUCKET", setting)
    install(
        fake_stack.replaced(f"{EXPERTS}.flashinfer_cutlass_moe", (", tune_max_num_tokens=max(self.max_capture_size, 1)", ""))
    )
    serving = Serving()
    serving.configure()
    assert str(fake_stack.patches()["flashinfer.fused_moe:cutlass_fused_moe"].state) == state
    assert serving.experts("flashinfer_cutlass_moe", "FlashInferExperts") == (16_384 if setting == "1" else FLOOR)


def test_native_where_every_caller_passes_the_estimate(install):
    module = f"{EXPERTS}.trtllm_fp8_moe"
    passes = ("(packed, hidden_states)", "(packed, hidden_states, tune_max_num_tokens=fi_moe_largest_bucket(self.moe_config))")
    install(fake_stack.replaced(module, passes))
    vllm_moe_tune_plugin.register()
    fake_stack.load("flashinfer")
    patches = fake_stack.patches()
    assert str(patches["flashinfer.fused_moe:trtllm_fp8_block_scale_routed_moe"].state) == "native"
    assert str(patches["flashinfer.fused_moe:trtllm_bf16_routed_moe"].state) == "applied"


def test_counts_of_seen_and_changed_calls(install):
    install()
    serving = Serving()
    serving.configure()
    kernel = importlib.import_module("flashinfer").trtllm_fp8_block_scale_routed_moe
    for passed in (1, 16_384, 20_000):
        kernel(IDS, tune_max_num_tokens=passed)
    record = fake_stack.patches()["flashinfer.fused_moe:trtllm_fp8_block_scale_routed_moe"]
    assert (record.calls, record.tuned) == (3, 1)
