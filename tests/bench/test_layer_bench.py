"""``bench layer`` through Triton's interpreter: the command as a user calls it, in a process of its own."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_tune_plugin.bench import schema

VLLM = schema._vllm_folder()
pytestmark = pytest.mark.skipif(VLLM is None, reason="vLLM is not installed")

#: Where vLLM 0.20 and later choose how tokens are assigned.
TRITON_MOE = Path(VLLM or "") / "model_executor/layers/fused_moe/experts/triton_moe.py"

COMMAND = "from vllm_moe_tune_plugin.bench.cli import bench; bench(prog_name='bench')"

#: The command where memory is short: weights of `128,2,32,32` do not fit, and three tokens' graphs do not, either.
SHORT_OF_MEMORY = f"""
import torch
from vllm_moe_tune_plugin.bench import layer

class SmallGpu(layer.Interpreter):
    def free_bytes(self):
        return 1 << 20

    def time(self, order):
        if len(order[0].outputs[0]) == 3:
            raise torch.cuda.OutOfMemoryError
        return super().time(order)

layer.Interpreter = SmallGpu
{COMMAND}
"""


def bench(*arguments: str, command: str = COMMAND, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MOE_TUNE_")}
    words = [sys.executable, "-c", command, *arguments]
    return subprocess.run(words, env=kept | environ, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "layer.json"
    arguments = ["--interpret", "--dtype", "bf16,fp8", "--tokens", "2", "--routing", "skewed", "--control", "-o", str(path)]
    done = bench("layer", *arguments, "--seconds", "0.001", "--shape", "8,2,32,64", "--shape", "tiny-llama4", "--ep", "1,2")
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = schema.read(path)["rows"]
    return found


def test_every_row_is_there_and_right(measured: Path) -> None:
    found, bandwidth = rows(measured), schema.read(measured)["bandwidth"]
    keys = {tuple(row["key"].values()) for row in found}
    assert len(found) == len(keys) == 2 * 2 * 2
    for row in found:
        assert row["status"] == "ok", row
        limit = 0.2 if row["key"]["dtype"] == "fp8" else 0.02
        assert set(row["relative_error"]) == {"stock", "control", "tuned"}
        # A rank that no token is routed to has nothing to be wrong.
        assert all(error < limit and (error > 0 or row["key"]["ep"] > 1) for error in row["relative_error"].values())
        assert set(map(len, row["samples_us"].values())) == {2}  # the time is over after one round
        assert row["ratio_ci95"][0] <= row["ratio"] <= row["ratio_ci95"][1]
        assert math.isclose(row["limit_us"], row["bytes"] / bandwidth * 1e6, abs_tol=6e-4)  # rounded to three digits


def test_the_arms_are_what_they_are_called(measured: Path) -> None:
    """The plugin's own counters say so, as figures from an interpreter cannot."""
    changed = [sum(tuning["tuned"] for tuning in row["tunings"].values()) for row in rows(measured)]
    natives = all(tuning["state"] != "applied" for row in rows(measured) for tuning in row["tunings"].values())
    assert natives or any(changed)


def test_report_shows_interpreted_results_as_such(measured: Path) -> None:
    done = bench("report", str(measured))
    assert done.returncode == 0, done.stderr
    assert "in Triton's interpreter: the times mean nothing" in done.stdout
    assert sum(line.startswith(("8,2,32,64", "tiny-llama4")) for line in done.stdout.splitlines()) == 8


def test_a_large_shape_is_none_for_the_interpreter(tmp_path: Path) -> None:
    done = bench("layer", "--interpret", "--shape", "8,2,32,64", "--shape", "gpt-oss-20b", "-o", str(tmp_path / "layer.json"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "gpt-oss-20b would take hours in the interpreter" in done.stderr
    assert not (tmp_path / "layer.json").exists()


def test_without_a_gpu_each_says_so_in_one_line(tmp_path: Path) -> None:
    for arguments in (["layer"], ["engine", "tiny"]):
        done = bench(*arguments, "-o", str(tmp_path / "results.json"), CUDA_VISIBLE_DEVICES="")
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 2, done.stderr
        assert last.startswith("Error: no GPU is visible")
    assert not (tmp_path / "results.json").exists()


def test_out_of_memory_is_a_row_and_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    arguments = ["layer", "--interpret", "--dtype", "bf16", "--routing", "uniform", "-o", str(path), "--tokens", "1,3"]
    arguments += ["--shape", "128,2,32,32", "--shape", "8,2,32,64"]
    short = bench(*arguments, command=SHORT_OF_MEMORY)
    assert short.returncode == 0, short.stdout + short.stderr
    first = rows(path)
    assert [(row["key"]["shape"], row["key"]["tokens"], row["status"]) for row in first] == [
        ("128,2,32,32", 1, "oom"),
        ("128,2,32,32", 3, "oom"),
        ("8,2,32,64", 1, "ok"),
        ("8,2,32,64", 3, "oom"),
    ]
    assert "128,2,32,32 bf16 uniform M=1: oom: out of GPU memory" in short.stdout

    again = bench(*arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "4 rows to" in again.stdout
    assert "1 there already" in again.stdout
    found = rows(path)
    assert [row["status"] for row in found] == ["ok"] * 4
    assert found[0] == first[2]  # with the samples of the first time


def only_row(script: str, tokens: int, folder: Path) -> dict[str, Any]:
    """What a script of tests/gpu measures of the tiny shape."""
    out = folder / "rows.json"
    words = [str(Path(__file__).parents[1] / "gpu" / script), str(out), "--interpret", "--shapes", "tiny", "--dtypes", "bf16"]
    command = [sys.executable, *words, "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    row: dict[str, Any]
    (row,) = json.loads(out.read_text())["rows"]
    return row


def test_account_of_each_kernel(tmp_path: Path) -> None:
    """The path of tests/gpu/account.py."""
    row = only_row("account.py", 4, tmp_path)
    assert row["limit_us"]["gate_up"] == pytest.approx(2 * row["limit_us"]["down"], rel=1e-2)
    assert row["overlap_us"] == pytest.approx(row["us"]["gate_up"] + row["us"]["down"] - row["us"]["both"], abs=0.05)


@pytest.mark.skipif(not TRITON_MOE.exists(), reason="this vLLM always sorts there")
def test_both_ways_of_assignment(tmp_path: Path) -> None:
    """The path of tests/gpu/assignment.py: each way was gone, with a right result."""
    row = only_row("assignment.py", 1, tmp_path)
    assert row["median_us"].keys() == {"sorted", "unsorted", "stock"}
    assert {"ratio_sorted", "ratio_unsorted"} == {name for name in row if name.startswith("ratio") and "ci95" not in name}
    assert max(row["relative_error"].values()) < 0.01
