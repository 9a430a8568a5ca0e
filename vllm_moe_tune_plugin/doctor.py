"""What the plugin does on this machine: the installed stack, the settings and the state of every patch.

The look is taken in a fresh process (``python -m vllm_moe_tune_plugin.doctor FILE LAYER``), in which vLLM's own loader loads
the plugin and the modules that the patches wait for are imported, as an engine would.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from vllm_moe_tune_plugin import __version__, fresh, plugin, tunings
from vllm_moe_tune_plugin.ledger import State
from vllm_moe_tune_plugin.patching import Verdict
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.stack import PACKAGES, exists, installed

GROUP, NAME = "vllm.general_plugins", "moe_tune"
DECODE = "decode_kernel"


class DoctorError(Exception):
    """The look could not be taken; the message says what to do."""


def why_not_loaded(vllm_plugins: str | None, is_installed: bool) -> str:
    """Why vLLM would not load the plugin, empty where it would.

    Args:
        vllm_plugins: the environment's ``VLLM_PLUGINS``, None where it is not set.
        is_installed: whether the entry point is there.
    """
    if not is_installed:
        return f"no entry point {NAME} in {GROUP}: install the plugin with pip in vLLM's environment"
    # As vLLM reads it: names are not stripped, and an empty value is one empty name.
    if vllm_plugins is not None and NAME not in vllm_plugins.split(","):
        return f"VLLM_PLUGINS is {vllm_plugins!r}, which does not name {NAME}"
    return ""


def _look(layer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Take the look in this process, which is the worse for it."""
    vllm_plugins = os.environ.get("VLLM_PLUGINS")
    reason = why_not_loaded(vllm_plugins, any(point.name == NAME for point in entry_points(group=GROUP)))
    importlib.import_module("vllm.plugins").load_general_plugins()
    records = plugin.records()
    if not records:
        reason = reason or "vLLM's loader did not load it; its log says why"
        session = plugin.Session(__version__, Settings(disable=frozenset(tunings.NAMES)))
        for patch in session.all_patches():
            patch.settle(Verdict(State.DISABLED, reason))
        records = session.records()
    else:
        _import_targets()
        records = plugin.records()
    settings = Settings.from_environ(os.environ, tunings.NAMES)
    values = dataclasses.asdict(settings) | {"disable": sorted(settings.disable)}
    look = {
        "stack": {
            "plugin": __version__,
            **{name: str(installed(name) or "") for name in PACKAGES},
            "python": ".".join(map(str, sys.version_info[:3])),
            "gpu": _gpu(),
            "vllm_plugins": vllm_plugins,
            "loaded": not reason,
            "not_loaded_because": reason,
        },
        "settings": values,
        "tunings": [record.as_json() for record in records],
    }
    if layer is not None:
        (record,) = (record for record in records if record.name == DECODE)
        look["layer"] = _decode(layer, settings) if record.state is State.APPLIED else _stock(layer, record.reason)
    return look


def _stock(layer: Mapping[str, Any], reason: str) -> dict[str, Any]:
    return {**layer, "decode_tokens": 0, "reason": reason}


def _decode(layer: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The most tokens for which the decode kernel serves a layer on this machine's first GPU, or on a Hopper where is none."""
    import torch

    from vllm_moe_tune_plugin import gpu, tuned_tiles
    from vllm_moe_tune_plugin.tunings import decode_kernel

    if "problem" not in layer:
        return _stock(layer, layer["reason"])
    problem = tuned_tiles.Problem(**layer["problem"])
    capability, found = gpu.MEASURED_ON, None
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        capability = gpu.capability(device)
        found = tuned_tiles.look_up(tuned_tiles.folder_of(settings), gpu.name(device), problem)
    size = 3 * problem.intermediate * problem.hidden * (1 if problem.dtype.startswith("fp8") else 2)
    tokens, reason = decode_kernel.reach(problem, size, capability, found, settings.decode_tokens)
    if problem.is_shared and settings.decode_tokens is None:
        reason += f", where all tokens come to all ranks ({decode_kernel.GATHERING[0]})"
    if not torch.cuda.is_available():
        reason = f"no GPU here; {reason}"
    return {**layer, "decode_tokens": tokens, "reason": reason}


def _import_targets() -> None:
    """Import what pending patches wait for; what cannot be imported here stays pending."""
    session = plugin.session()
    pending = [patch for patch in session.all_patches() if patch.state is State.PENDING] if session else []
    for module in dict.fromkeys(name for patch in pending for name in patch.modules if exists(name)):
        try:
            importlib.import_module(module)
        except Exception as error:
            for patch in pending:
                if module in patch.modules and patch.state is State.PENDING:
                    patch.reason = f"{module} cannot be imported here ({type(error).__name__}: {error})"


def _gpu() -> str:
    """The first GPU's name and compute capability, empty where there is none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    return f"{torch.cuda.get_device_name(0)} (sm{''.join(map(str, torch.cuda.get_device_capability(0)))})"


def layer_of(model: pathlib.Path, tp: int, ep: int) -> dict[str, Any]:
    """A checkpoint's MoE layer on one rank: ``{"model", "problem"}``, or a ``"reason"`` why the decode kernel takes none.

    Raises:
        DoctorError: its experts cannot be shared out like that, or it is no MoE model's checkpoint.
    """
    from vllm_moe_tune_plugin import checkpoint
    from vllm_moe_tune_plugin.tuned_tiles import Problem

    try:
        config = checkpoint.read(model)
        experts = checkpoint.experts_of(config)["num_experts"]
    except checkpoint.CheckpointError as error:
        raise DoctorError(str(error)) from error
    if experts % ep:
        raise DoctorError(f"{experts} experts cannot be shared out to {ep} ranks")
    try:
        shape, dtype = checkpoint.layer_of(config, tp)
    except checkpoint.CheckpointError as error:
        return {"model": str(model), "reason": str(error)}
    return {"model": str(model), "problem": dataclasses.asdict(Problem.of(shape, dtype, ep))}


def examine(layer: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Take the look in a fresh process.

    Args:
        layer: what :func:`layer_of` gives, to be told for how many tokens the decode kernel serves it.

    Returns:
        ``{"stack": {...}, "settings": {...}, "tunings": [{"name", "state", "reason", "patches": [...]}]}``; with a layer
        also ``"layer": {"model", "problem", "decode_tokens", "reason"}``.

    Raises:
        DoctorError: vLLM is not installed, or breaks when it is imported.
    """
    if not exists("vllm"):
        raise DoctorError("vLLM is not installed here: run this in vLLM's environment, or pip install vllm")
    # Without a GPU vLLM swaps triton for a placeholder, unless it is told that there is none to look for.
    environ = os.environ if _has_nvidia_driver() else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        look: dict[str, Any] = fresh.run(__name__, json.dumps(layer), environ=environ)
    except fresh.FreshError as error:
        raise DoctorError(f"vLLM cannot be imported here: {error}") from error
    return look


def _has_nvidia_driver() -> bool:
    return pathlib.Path("/proc/driver/nvidia/version").exists() or pathlib.Path("/dev/nvidiactl").exists()


def has_failed(look: dict[str, Any]) -> bool:
    return any(tuning["state"] == State.FAILED for tuning in look["tunings"])


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(json.dumps(_look(json.loads(sys.argv[2]))))
