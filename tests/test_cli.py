"""The commands where something is missing or wrong: one line that says what to do."""

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vllm_moe_tune_plugin import coverage, coverage_cli, doctor, fresh, selftest
from vllm_moe_tune_plugin.bench import cli as bench_cli
from vllm_moe_tune_plugin.bench import layer, schema
from vllm_moe_tune_plugin.cli import main
from vllm_moe_tune_plugin.coverage import Coverage, KernelCoverage, Side, Span

COVERAGE = ["coverage", "--max-num-batched-tokens", "8"]


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"], ["selftest"], COVERAGE])
def test_without_vllm(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    for module in (doctor, selftest):
        monkeypatch.setattr(module, "exists", lambda name: False)
    monkeypatch.setattr(coverage, "installed", lambda name: None)
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert "is not installed here: run this in" in result.output


@pytest.mark.parametrize(("state", "status"), [("failed", 1), ("applied", 0), ("unsupported", 0)])
def test_a_failed_tuning_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, state: str, status: int) -> None:
    tuning = {"name": "int32_ids", "state": state, "reason": "", "patches": []}
    monkeypatch.setattr(doctor, "examine", lambda layer: {"stack": {}, "settings": {}, "tunings": [tuning]})
    assert CliRunner().invoke(main, ["doctor", "--json"]).exit_code == status


@pytest.mark.parametrize("options", [["--tp", "2"], ["--ep", "2"]])
def test_doctor_is_told_of_ranks_without_a_model(options: list[str]) -> None:
    result = CliRunner().invoke(main, ["doctor", *options])
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == "Error: --tp and --ep are a model's: name it by --model"


# --- processes of their own


CPP = """RuntimeError: no libtorch
Exception raised from run at module.cpp:7 (most recent call first):
frame #0: <unknown function> + 0x84fa7
<omitting python frames>"""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (f"print('a log line')\nraise ImportError({CPP!r})", "ImportError: RuntimeError: no libtorch"),
        ("import sys\nsys.exit('no such thing')", "no such thing"),
        ("import os\nos._exit(3)", "it ended with status 3 and said nothing"),
        ("", "it ended with status 0 and said nothing"),
    ],
)
def test_why_a_fresh_process_failed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str) -> None:
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(fresh.FreshError) as failed:
        fresh.run("broken")
    assert str(failed.value) == why


def test_a_fresh_process_answers_what_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import json, os, pathlib, sys\n"
    code += "pathlib.Path(sys.argv[1]).write_text(json.dumps([*sys.argv[2:], os.environ['TOLD']]))"
    (tmp_path / "echo.py").write_text(code)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert fresh.run("echo", "a", "b", environ={**os.environ, "PYTHONPATH": paths, "TOLD": "c"}) == ["a", "b", "c"]


@pytest.mark.parametrize("target", ["nowhere/plot.png", "plot.txt"])
def test_a_coverage_plot_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    pytest.importorskip("matplotlib")
    side = Side(8, (8,), (Span(1, 8, 8, "tuned"),))
    kernel = KernelCoverage("kernel", "module:caller", 8, side, side, (), 0, False, ())
    monkeypatch.setattr(coverage_cli, "examine", lambda serving: Coverage(serving, "1", "1", (kernel,)))
    result = CliRunner().invoke(main, [*COVERAGE, "--plot", str(tmp_path / target)])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: --plot cannot write {tmp_path / target}: ")
    assert result.output.count("\n") == 1


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
