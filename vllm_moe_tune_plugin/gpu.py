"""What the tunings ask of a GPU, once each; the interpreter stands for the GPU on which they were measured."""

from __future__ import annotations

import functools

import torch

#: The compute capability of the GPUs on which the tunings were measured (Hopper).
MEASURED_ON = (9, 0)


def not_nvidia() -> str:
    """Why what was written for NVIDIA GPUs stays away, empty where this torch may run on one, or on none (the interpreter)."""
    others = {"ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    return next((f"written for NVIDIA GPUs, not for {name}" for name, version in others.items() if version is not None), "")


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else MEASURED_ON


def has_pdl(device: torch.device) -> bool:
    """Whether kernels can be launched with programmatic dependent launch: compute capability 9.0 and later."""
    return device.type == "cuda" and capability(device) >= (9, 0)


@functools.cache
def name(device: torch.device) -> str:
    """By which the results of a search are kept."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many the GPU has; the interpreter stands for an H100 or H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
