"""The coverage model, the fingerprint and the list of faults, without vLLM and FlashInfer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from vllm_moe_tune_plugin import coverage, known_bad
from vllm_moe_tune_plugin.coverage import Buckets, Serving
from vllm_moe_tune_plugin.ledger import State
from vllm_moe_tune_plugin.patching import Around, Convert, Patch
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.tunings import autotune_bucket, cache_identity, warmup_buckets

BUCKETS = st.sets(st.integers(1, 400), min_size=1, max_size=12).map(lambda found: tuple(sorted(found)))


def rounding_up(buckets: tuple[int, ...]) -> Buckets:
    return Buckets(buckets, lambda tokens: next((bucket for bucket in buckets if bucket >= tokens), buckets[-1]))


def rounding_down(buckets: tuple[int, ...]) -> Buckets:
    return Buckets(buckets, lambda tokens: next((bucket for bucket in reversed(buckets) if bucket <= tokens), buckets[0]))


@given(BUCKETS, st.integers(1, 500), st.sampled_from([rounding_up, rounding_down]))
def test_spans_are_the_mapping_itself(buckets, sizes, rounding):
    spec = rounding(buckets)
    runs = list(coverage.spans(spec.map_to_tuning_buckets, sizes))
    each = [(size, bucket) for first, last, bucket in runs for size in range(first, last + 1)]
    assert each == [(size, spec.map_to_tuning_buckets(size)) for size in range(1, sizes + 1)]


@given(BUCKETS, BUCKETS, st.integers(1, 500))
def test_each_batch_size_is_served_once_and_as_its_bucket_says(buckets, tuned, sizes):
    found = coverage.side(buckets[-1], rounding_up(buckets), tuned, sizes)
    assert [size for span in found.spans for size in range(span.first, span.last + 1)] == list(range(1, sizes + 1))
    for span in found.spans:
        assert (span.served == "miss") == (span.bucket not in tuned)
        if span.served == "tuned":
            assert span.last <= span.bucket
        elif span.served != "miss":
            assert span.first > span.bucket == buckets[-1]
    assert found.uncovered == pytest.approx(1 - found.sizes("tuned") / sizes)


@given(BUCKETS, BUCKETS, st.integers(1, 8))
def test_what_is_widened_holds_all_that_serving_looks_up_and_all_that_stock_tunes(own, overridden, dp_size):
    spec = rounding_up(own)
    tuned = warmup_buckets.widened(overridden, spec, dp_size) or overridden
    looked_up = {spec.map_to_tuning_buckets(size) for size in range(1, max(overridden) * dp_size + 1)}
    assert looked_up <= set(tuned)
    assert set(overridden) <= set(tuned) <= looked_up | set(overridden)
    assert max(tuned) <= max(own[-1], overridden[-1])  # never more than the kernel's bound


def test_cutlass_takes_the_memory_that_ended_an_engine():
    """vLLM PR 53186: 12.22 GiB asked and 9.68 free once the bucket had grown from 8192 to 32768 tokens, on such a model."""
    serving = Serving(32768, hidden_size=6144, intermediate_size=2048, num_experts=256, top_k=8, quantization="nvfp4")
    more = [coverage.profile_bytes("cutlass_fused_moe", tokens, serving, "nvfp4") for tokens in (8192, 32768)]
    assert 12.22 - 9.68 < (more[1] - more[0]) / 2**30 < 4


@pytest.mark.parametrize(("quantization", "width"), [("bf16", 2), ("fp8_tensor", 1), ("nvfp4", 0.5)])
@pytest.mark.parametrize(("hidden", "inner"), [(7168, 2048), (2048, 768), (4096, 14336)])
def test_what_doctor_says_of_cutlass_memory_is_what_coverage_says(quantization, width, hidden, inner):
    serving = Serving(32768, hidden_size=hidden, intermediate_size=inner, top_k=8, quantization=quantization)
    said = eval(autotune_bucket.CUTLASS_BYTES, {"top_k": 8, "hidden": hidden, "inner": inner, "width": width, "max": max})
    counted = coverage.profile_bytes("cutlass_fused_moe", 32768, serving, quantization)
    assert said * 32768 == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize(
    ("kernel", "flashinfer", "forbidden"),
    [
        ("trtllm_fp4_block_scale_moe", "0.6.8.post1", True),
        ("trtllm_fp4_block_scale_moe", "0.6.10", True),
        ("trtllm_fp4_block_scale_moe", "0.6.11.post2", False),
        ("flashinfer::trtllm_fp4_block_scale_moe", "0.6.17", True),
        ("flashinfer::trtllm_fp4_block_scale_moe", "0.6.16.post3", False),
        ("trtllm_bf16_moe", "0.6.8.post1", False),
        ("trtllm_bf16_routed_moe", "0.6.6", True),
        ("cutlass_fused_moe", "0.6.9", False),
        ("trtllm_fp4_block_scale_routed_moe", "0.7.2.post1", False),
    ],
)
def test_tuning_is_not_widened_where_tactics_are_known_to_be_wrong(kernel, flashinfer, forbidden):
    fault = known_bad.find(kernel, Version(flashinfer))
    assert (fault is not None) == forbidden
    assert fault is None or fault.source


def test_every_fault_names_its_source():
    for fault in known_bad.FAULTS:
        assert any(word in fault.source for word in ("issue", "PR"))
        assert fault.fixed is None or fault.since is None or fault.since < fault.fixed


def test_the_fingerprint_follows_the_settings_that_change_what_is_tuned():
    marks = [
        cache_identity.fingerprint(settings)
        for settings in (
            Settings(),
            Settings(cutlass_bucket=True),
            *(Settings(disable=frozenset({name})) for name in cache_identity.TUNE),
        )
    ]
    assert None not in marks
    assert len(set(marks)) == len(marks)


def test_the_fingerprint_follows_nothing_else():
    assert cache_identity.fingerprint(Settings(disable=frozenset({"int32_ids"}), log="debug")) == cache_identity.fingerprint(
        Settings()
    )
    assert cache_identity.fingerprint(Settings(disable=frozenset(cache_identity.TUNE))) is None


def test_two_processes_of_different_ranks_have_one_fingerprint():
    """Python's own hashes differ between processes, and each rank's environment names the rank."""
    code = (
        "from vllm_moe_tune_plugin.settings import Settings\n"
        "from vllm_moe_tune_plugin.tunings.cache_identity import fingerprint\n"
        "print(fingerprint(Settings()))"
    )
    marks = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RANK": rank, "LOCAL_RANK": rank, "VLLM_DP_RANK": rank, "PYTHONHASHSEED": rank},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for rank in ("0", "7")
    }
    assert len(marks) == 1


def test_around_lets_the_stock_call_be_and_fails_safe():
    left: list[str] = []

    @contextlib.contextmanager
    def context():
        left.append("entered")
        yield
        left.append("left")

    def patched(enter):
        patch = Patch("module:name", lambda function: Around(enter))
        patch.applied = True
        return patch, lambda stock: Around(enter).wrapper(patch)(stock, None, (3,), {})

    patch, call = patched(lambda instance, args, kwargs: context())
    assert call(lambda tokens: (tokens, list(left))) == (3, ["entered"])
    assert left == ["entered", "left"]
    assert (patch.calls, patch.tuned) == (1, 1)
    with pytest.raises(ZeroDivisionError):
        call(lambda tokens: tokens // 0)
    assert patch.live
    assert left == ["entered", "left", "entered"]

    patch, call = patched(lambda instance, args, kwargs: None)
    assert (call(lambda tokens: tokens), patch.tuned) == (3, 0)

    patch, call = patched(lambda instance, args, kwargs: 1 // 0)
    assert call(lambda tokens: tokens) == 3
    assert (patch.state, patch.live) == (State.FAILED, False)


def test_a_converted_result_is_ours_and_a_failing_conversion_is_stock():
    patch = Patch("module:name", lambda function: Convert(str))
    patch.applied = True
    assert Convert(lambda result: result + 1).wrapper(patch)(lambda: 1, None, (), {}) == 2
    assert Convert(lambda result: result + "").wrapper(patch)(lambda: 1, None, (), {}) == 1
    assert (patch.state, patch.live) == (State.FAILED, False)
