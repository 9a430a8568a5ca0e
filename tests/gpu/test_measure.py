"""The order and the end of the measurements; what stands for vLLM's Python here notes what it was asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import measure
import pytest
from click.testing import CliRunner
from measure import JOBS, Job

PYTHON = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
words = sys.argv[1:]
out = pathlib.Path(words[words.index("-o") + 1])
begin = time.monotonic()
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
while time.monotonic() < begin + float(os.environ["SECONDS_OF_" + out.stem]) and not ended:
    time.sleep(0.01)
entry = {{"words": words, "gpus": os.environ["CUDA_VISIBLE_DEVICES"], "times": [begin, time.monotonic()], "ended": ended}}
out.write_text(json.dumps(entry))
sys.exit(int(os.environ.get("STATUS_OF_" + out.stem, "0")))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(jobs: dict[str, tuple[int, float]], *more: str) -> tuple[int, str, dict[str, Any]]:
        """``jobs``: GPUs and seconds of each; returns the status, what was said, and what each job noted."""
        monkeypatch.setattr(
            measure, "JOBS", tuple(Job(name, "1.0", ["layer", "--", "x"], gpus) for name, (gpus, _) in jobs.items())
        )
        for name, (_, seconds) in jobs.items():
            monkeypatch.setenv(f"SECONDS_OF_{name}", str(seconds))
        done = CliRunner().invoke(measure.main, [str(tmp_path), "--python", f"1.0={python}", "--gpus", "3,7", *more])
        noted = {name: json.loads(path.read_text()) for name in jobs if (path := tmp_path / f"{name}.json").exists()}
        return done.exit_code, done.output, noted

    return run


def test_jobs_share_the_gpus_and_keep_their_order(run: Any) -> None:
    status, said, noted = run({"a": (1, 0.6), "b": (1, 0.1), "both": (2, 0.1), "c": (1, 0.1)})
    assert status == 0, said
    assert {noted["a"]["gpus"], noted["b"]["gpus"]} == {"3", "7"}
    assert sorted(noted["both"]["gpus"].split(",")) == ["3", "7"]
    begin = {name: entry["times"][0] for name, entry in noted.items()}
    end = {name: entry["times"][1] for name, entry in noted.items()}
    assert begin["b"] < end["a"] <= begin["both"]
    assert end["both"] <= begin["c"]
    words = noted["a"]["words"]
    assert words[:4] == ["-m", "vllm_moe_tune_plugin", "bench", "layer"]
    assert words[-2:] == ["--", "x"]


def test_what_runs_when_the_time_is_over_is_asked_to_end(run: Any) -> None:
    status, said, noted = run({"a": (2, 60), "b": (1, 0)}, "--limit", "3")
    assert noted["a"]["ended"]
    assert "b" not in noted
    assert said.splitlines() == ["a: stopped, the time is over", "b: not begun"]
    assert status == 0


def test_a_failure_is_told_and_the_rest_goes_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATUS_OF_a", "3")
    status, said, noted = run({"a": (1, 0), "b": (1, 0)})
    assert status == 1
    assert "a: FAILED" in said
    assert "b: finished" in said
    assert noted.keys() == {"a", "b"}


def test_only_what_is_named_and_can_be_had(run: Any) -> None:
    assert "no job nonsense; there are a, four" in run({"a": (1, 0), "four": (4, 0)}, "nonsense")[1]
    assert run({"a": (1, 0), "four": (4, 0)})[2].keys() == {"a"}


def test_what_is_named_and_cannot_be_had_is_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, said, noted = run({"a": (1, 0), "four": (4, 0)}, "a", "four")
    assert (status, noted) == (2, {})
    assert said.splitlines()[-1] == "Error: four needs 4 GPUs: name them by --gpus"
    monkeypatch.setattr(measure, "JOBS", (Job("old", "0.9", ["layer"]),))
    done = CliRunner().invoke(measure.main, ["out", "old", "--python", f"1.0={sys.executable}"])
    assert done.exit_code == 2
    assert done.output.splitlines()[-1] == "Error: old needs vLLM 0.9: give --python 0.9=PYTHON"


@pytest.mark.parametrize("python", ["1.0", "1.0=", "1.0=/nowhere/python"])
def test_an_interpreter_that_is_not_there_is_told(run: Any, python: str) -> None:
    status, said, noted = run({"a": (1, 0)}, "--python", python)
    assert (status, noted) == (2, {})
    assert f"Invalid value for '--python': '{python}': VLLM=PYTHON must name an interpreter" in said


def test_every_job_is_a_command_that_exists() -> None:
    from vllm_moe_tune_plugin.bench.cli import bench

    assert len({job.name for job in JOBS}) == len(JOBS)
    for job in JOBS:
        command = bench.commands[job.words[0]]
        command.make_context(job.words[0], list(job.words[1:]))
