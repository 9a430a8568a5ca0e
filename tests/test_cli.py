"""The commands where something is missing or wrong: one line that says what to do."""

from typing import Any

import pytest
from click.testing import CliRunner

from vllm_moe_tune_plugin import doctor, selftest
from vllm_moe_tune_plugin.bench import cli as bench_cli
from vllm_moe_tune_plugin.bench import layer, schema
from vllm_moe_tune_plugin.cli import main


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"], ["selftest"]])
def test_without_vllm(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    for module in (doctor, selftest):
        monkeypatch.setattr(module, "exists", lambda name: False)
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert "run this in vLLM's environment" in result.output


@pytest.mark.parametrize(("state", "status"), [("failed", 1), ("applied", 0), ("unsupported", 0)])
def test_a_failed_tuning_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, state: str, status: int) -> None:
    tuning = {"name": "int32_ids", "state": state, "reason": "", "patches": []}
    monkeypatch.setattr(doctor, "examine", lambda layer: {"stack": {}, "settings": {}, "tunings": [tuning]})
    assert CliRunner().invoke(main, ["doctor", "--json"]).exit_code == status


# --- bench


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("words", "kind"), [(["layer"], "layer"), (["engine", "a/model"], "engine-model")])
def test_interrupted_before_the_first_row(monkeypatch: pytest.MonkeyPatch, words: list[str], kind: str) -> None:
    monkeypatch.setattr(layer, "start", interrupted)
    monkeypatch.setattr(bench_cli, "_require_engine", interrupted)
    monkeypatch.setattr(schema, "vllm_version", lambda: "1.0")
    result = CliRunner().invoke(main, ["bench", *words])
    assert result.exit_code == 1
    assert result.output.startswith("Error: stopped; finished ")
    assert result.output.endswith(f" are in bench-{kind}-vllm1.0.json\n")


@pytest.mark.parametrize("option", ["--dp", "--iterations", "--input-len", "--output-len", "--pairs"])
def test_an_engine_runs_at_least_one_of_each(option: str) -> None:
    result = CliRunner().invoke(main, ["bench", "engine", "model", option, "0"])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}': 0 is not in the range" in result.output
