"""The commands where there is no vLLM: one line that says what to do."""

import pytest
from click.testing import CliRunner

from vllm_moe_tune_plugin import doctor, selftest
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
