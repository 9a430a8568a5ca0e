"""A module of this package run in a process of its own, where importing vLLM leaves nothing behind in the caller's."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any


class FreshError(Exception):
    """The process failed; the message is the line of its output that tells why."""


def run(module: str, *args: str, environ: Mapping[str, str] | None = None) -> Any:
    """The JSON that ``python -m MODULE FILE ARGS...`` leaves in FILE.

    Raises:
        FreshError: it failed, or left nothing.
    """
    with tempfile.TemporaryDirectory(prefix="moe-tune-") as folder:
        answer = pathlib.Path(folder) / "answer.json"
        command = [sys.executable, "-W", "ignore", "-m", module, str(answer), *args]
        # Not its standard output: vLLM logs there.
        done = subprocess.run(
            command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False
        )
        if done.returncode != 0 or not answer.exists():
            raise FreshError(_telling(done.stderr) or f"it ended with status {done.returncode} and said nothing")
        return json.loads(answer.read_text())


def _telling(output: str) -> str:
    """The last line that names an exception, since the frames of C++ code may follow it; without any, the last line."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)(:|$)", line)]
    return (errors or lines or [""])[-1].strip()
