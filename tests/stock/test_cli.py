"""The commands as a user calls them, beside stock vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from vllm_moe_tune_plugin.tunings import NAMES
from vllm_moe_tune_plugin.tunings.autotune_bucket import CUTLASS_BYTES

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs stock vLLM", allow_module_level=True)


def command(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MOE_TUNE_", "VLLM_PLUGINS"))}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "vllm_moe_tune_plugin", *words],
        env={**environ, **settings, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_doctor_shows_every_patch() -> None:
    result = command("doctor", "-v")
    assert result.returncode == 0, result.stderr
    assert "vLLM loads the plugin: yes" in result.stdout
    for name in NAMES:
        assert re.search(rf"^{name}: (applied|native|unsupported)", result.stdout, re.MULTILINE), name
    assert "fused_moe:fused_experts_impl: native" in result.stdout
    assert "PR 53186" in result.stdout


def test_doctor_says_what_a_larger_cutlass_bucket_asks_for() -> None:
    look = json.loads(command("doctor", "--json", MOE_TUNE_CUTLASS_BUCKET="1").stdout)
    reason = next(tuning["reason"] for tuning in look["tunings"] if tuning["name"] == "autotune_bucket")
    assert f"about {CUTLASS_BYTES} bytes of GPU memory for each" in reason
    assert "`vllm-moe-tune coverage --cutlass-bucket`" in reason


def test_doctor_as_json_without_some_tunings() -> None:
    result = command("doctor", "--json", MOE_TUNE_DISABLE="int32_ids, nonsense", MOE_TUNE_LOGG="debug")
    assert result.returncode == 0, result.stderr
    look = json.loads(result.stdout)
    assert {"vllm", "flashinfer-python", "torch", "triton", "gpu", "loaded"} <= look["stack"].keys()
    assert look["settings"]["disable"] == ["int32_ids"]
    unknown_setting, unknown_name = look["settings"]["complaints"]
    assert "MOE_TUNE_LOGG" in unknown_setting
    assert "'nonsense'" in unknown_name
    assert "low_latency_assignment" in unknown_name
    tunings = {tuning["name"]: tuning for tuning in look["tunings"]}
    assert tunings["int32_ids"]["state"] == "disabled"
    assert tunings["decode_kernel"]["state"] == "applied"
    assert {"target", "state", "reason"} <= tunings["decode_kernel"]["patches"][0].keys()


def test_doctor_tells_that_vllm_will_not_load_it() -> None:
    look = json.loads(command("doctor", "--json", VLLM_PLUGINS="another").stdout)
    assert look["stack"]["loaded"] is False
    assert "VLLM_PLUGINS is 'another'" in look["stack"]["not_loaded_because"]
    assert {tuning["state"] for tuning in look["tunings"]} == {"disabled"}


def test_doctor_tells_what_serves_a_model(tmp_path) -> None:
    config = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = command("doctor", "--model", str(tmp_path), "--ep", "2")
    serves = "with TritonExperts the decode kernel up to 11 tokens, stock beyond (no GPU here; as measured on Hopper"
    assert f"{tmp_path}: {serves}, where all tokens come to all ranks (allgather_reducescatter))" in result.stdout


def test_selftest_passes() -> None:
    result = command("selftest")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^([1-9]\d+) passed, 0 failed$", result.stdout, re.MULTILINE)
    assert "decode_kernel" in result.stdout


def test_tune_searches_and_keeps_what_it_found(tmp_path) -> None:
    """The whole path in the interpreter, where either may win."""
    result = command("tune", "--shape", "8,2,16,32", "--seconds", "5", "--interpret", "-v", "--cache-dir", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert int(re.search(r"(\d+) tiles tried", result.stdout)[1]) > 1
    (layer,) = json.loads((tmp_path / "interpreter.json").read_text())["layers"]
    ratios = {int(tokens): ratio for tokens, ratio in layer["ratios"].items()}
    assert ratios.keys() == {1, 2}
    assert layer["tokens"] in (0, 1, 2)
    assert all(ratios[tokens] > 1 for tokens in range(1, layer["tokens"] + 1))
    assert ("stays stock" if layer["tokens"] == 0 else "the decode kernel serves up to") in result.stdout
    assert layer["problem"] == {
        "num_experts": 8,
        "local_experts": 8,
        "top_k": 2,
        "intermediate": 16,
        "hidden": 32,
        "dtype": "bf16",
    }
