"""What the tunings ask of a GPU, once each; the interpreter stands for the GPU on which they were measured."""

from __future__ import annotations

import functools

import torch

#: The compute capability of the GPUs on which the tunings were measured (Hopper).
MEASURED_ON = (9, 0)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else MEASURED_ON


@functools.cache
def name(device: torch.device) -> str:
    """By which the results of a search are kept."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many the GPU has; the interpreter stands for an H100 or H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
