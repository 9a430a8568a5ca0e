"""The decode kernels compile for Hopper, in bf16 and in fp8 blocks, with an expert map and without; see `compile_decode.py`."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys


def test_both_kernels_compile(tmp_path: pathlib.Path) -> None:
    """In a process of its own: here other tests have put the interpreter in the compiler's place."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    program = pathlib.Path(__file__).with_name("compile_decode.py")
    root = str(program.parents[1])
    environ |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([root, environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(program)], env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(one["fp8"], one["mapped"]) for one in compiled} == {(False, False), (False, True), (True, False), (True, True)}
    assert all(len(one["bytes"]) == 2 for one in compiled)
