"""The files of results: what ``bench layer`` and ``bench engine`` write and ``bench report`` reads.

One JSON object a file; ``schema.json`` beside this module is its JSON Schema, with a description of every field. A file
belongs to one environment and one way of measuring: rows are only added to a file where both are the same, so that a ratio
never spans machines, versions or settings.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_moe_tune_plugin import __version__
from vllm_moe_tune_plugin.stack import PACKAGES, installed

FORMAT = 1
KINDS = ("layer", "engine", "serve")

#: What two files must share for their rows to stand in one table.
MACHINE = ("gpu", "gpu_id", "driver")


class BenchError(Exception):
    """The benchmark cannot be run or read; the message says what to do, in one line."""


class Results:
    """One file of results, written anew after each row."""

    def __init__(self, path: pathlib.Path, kind: str, environment: Mapping[str, Any], method: Mapping[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "kind": kind,
            "environment": dict(environment),
            "method": dict(method),
            "rows": [],
        }

    def resume(self) -> int:
        """Take over the finished rows of an existing file; returns how many there are.

        Raises:
            BenchError: the file holds something else, or rows of another environment or method; or none can be written there.
        """
        require_writable(self.path.parent)
        if not self.path.exists():
            return 0
        old = read(self.path)
        for part in ("kind", "environment", "method"):
            if _lasting(old[part]) != _lasting(self.data[part]):
                raise BenchError(
                    f"{self.path} holds rows of another {_difference(part, old, self.data)}; name another --output"
                )
        self.data = old
        self.data["rows"] = [row for row in old["rows"] if row["status"] in ("ok", "unsupported")]
        return len(self.data["rows"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.data["rows"]
        return rows

    def has(self, key: Mapping[str, Any]) -> bool:
        return any(row["key"] == key for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        """Replace the file as a whole: one that was stopped while it wrote leaves the previous state."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(dump(self.data))
        fresh.replace(self.path)


def require_writable(folder: pathlib.Path) -> None:
    """Make a folder, and raise BenchError where nothing can be written there: to be called before hours of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BenchError(f"{folder} cannot be written to: {error.strerror}; name another folder") from error


def dump(data: Mapping[str, Any]) -> str:
    """JSON with one line for each row: small, and a diff shows which rows changed."""
    head = json.dumps({name: value for name, value in data.items() if name != "rows"}, indent=1)
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in data["rows"])
    return head.removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'


def read(path: pathlib.Path) -> dict[str, Any]:
    """Read one file.

    Raises:
        BenchError: it is no file of results.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("kind") not in KINDS:
        raise BenchError(f"{path} is no file of results of this version")
    # By name: it is vLLM's dependency, which a machine that checks types need not have.
    wrong = importlib.import_module("jsonschema").exceptions.best_match(_validator().iter_errors(data))
    if wrong is not None:
        raise BenchError(f"{path} does not follow the schema: {wrong.json_path}: {wrong.message[-200:]}")
    return data


@functools.cache
def _validator() -> Any:
    schema = json.loads(pathlib.Path(__file__).with_name("schema.json").read_text())
    return importlib.import_module("jsonschema").Draft202012Validator(schema)


def _lasting(part: Any) -> Any:
    return {name: value for name, value in part.items() if name != "time"} if isinstance(part, dict) else part


def _difference(part: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if part == "kind":
        return f"kind ({old['kind']})"
    before, after = _lasting(old[part]), _lasting(new[part])
    name = next(name for name in {**before, **after} if before.get(name) != after.get(name))
    return f"{part} ({name}: {before.get(name)!r}, here {after.get(name)!r})"


# ---- environment


def environment(commit: str = "") -> dict[str, Any]:
    """What the results depend on. It touches the GPU only through the driver's library, as engines come up beside it."""
    settings = {
        # Of a path its last part: where things lie on a machine is nobody else's business.
        name: pathlib.PurePath(value).name if value.startswith("/") else value
        for name, value in sorted(os.environ.items())
        if name.startswith(("MOE_TUNE_", "VLLM_"))
    }
    for name in ("VLLM_PLUGINS", "MOE_TUNE_STATUS_DIR"):  # the benchmark's own switches
        settings.pop(name, None)
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **gpu(),
        "python": platform.python_version(),
        **{name: str(installed(name) or "") for name in PACKAGES},
        "vllm": vllm_version(),
        "plugin": __version__,
        "commit": commit or _commit(),
        "settings": settings,
    }


def gpu() -> dict[str, Any]:
    """The first visible GPU as NVIDIA's library names it; empty strings where there is none."""
    none = {"gpu": "", "gpu_id": "", "driver": "", "gpu_count": 0}
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return none
    with contextlib.suppress(Exception), _nvml() as nvml:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        first = visible[0] if visible else "0"
        handle = nvml.nvmlDeviceGetHandleByIndex(int(first)) if first.isdigit() else nvml.nvmlDeviceGetHandleByUUID(first)
        uuid = str(nvml.nvmlDeviceGetUUID(handle))
        return {
            "gpu": str(nvml.nvmlDeviceGetName(handle)),
            # Enough to tell two machines apart, and nothing that names one.
            "gpu_id": hashlib.sha256(uuid.encode()).hexdigest()[:12],
            "driver": str(nvml.nvmlSystemGetDriverVersion()),
            "gpu_count": len(visible) or int(nvml.nvmlDeviceGetCount()),
        }
    return none


@functools.cache
def _vllm_folder() -> pathlib.Path | None:
    spec = importlib.util.find_spec("vllm")
    return pathlib.Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def vllm_version() -> str:
    """The version by its metadata, or by its file where it runs from a folder without any."""
    folder = _vllm_folder()
    found = installed("vllm")
    if found is None and folder is not None and (folder / "_version.py").exists():
        match = re.search(r"__version__.*['\"]([^'\"]+)['\"]", (folder / "_version.py").read_text())
        return match[1] if match else ""
    return str(found or "")


@functools.cache
def _pynvml() -> Any:
    """The copy of NVIDIA's bindings that vLLM carries, without vLLM: another one may be another project of that name."""
    spec = importlib.util.spec_from_file_location("moe_tune_pynvml", str(_vllm_folder()) + "/third_party/pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it looks itself up there
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    nvml = _pynvml()
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def memory_in_use() -> int:
    """Bytes of the visible GPUs' memory in use by all processes, 0 where there is no GPU."""
    visible = [int(name) for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.isdigit()]
    with contextlib.suppress(Exception), _nvml() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in visible or range(nvml.nvmlDeviceGetCount())]
        return sum(int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    return 0


def _commit() -> str:
    """The commit of a checkout of this project; empty where the plugin is installed."""
    here = pathlib.Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    if not (here.parent.parent / ".git").exists():
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
