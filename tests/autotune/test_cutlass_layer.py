"""The measurement of FlashInfer's CUTLASS experts (tests/gpu/cutlass_layer.py), down to the call of FlashInfer's C++ code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_moe_tune_plugin.stack import installed

SCRIPT = Path(__file__).parents[1] / "gpu" / "cutlass_layer.py"

if (installed("vllm") or Version("0")) < Version("0.30"):
    pytest.skip("written for the warm-up of vLLM 0.30 and later", allow_module_level=True)


def test_stock_serves_large_batches_with_the_tactic_of_8192(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--no-gpu", "--shape", "8,2,16,32", "--tokens", "4096,12288,16384", "--rounds", "1"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MOE_TUNE_")}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(out), *words]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    rows = {row["tokens"]: row["tuned_for"] for row in json.loads(out.read_text())["rows"]}
    assert rows[4096] == {"stock": 4096, "tuned": 4096}
    assert rows[12288] == rows[16384] == {"stock": 8192, "tuned": 16384}
    assert "foreign wrapper" not in done.stdout
