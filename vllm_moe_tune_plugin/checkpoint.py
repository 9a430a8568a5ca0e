"""What a checkpoint's `config.json` tells of its MoE layers."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from vllm_moe_tune_plugin.bench.shapes import DTYPES, Shape

#: How a checkpoint's quantisation is named where layers are measured.
_DTYPES = {"bf16": "bf16", "fp8_block": "fp8-block", "fp8_tensor": "fp8"}


class CheckpointError(Exception):
    """The configuration tells too little, or of something else; the message says what."""


def read(folder: pathlib.Path) -> dict[str, Any]:
    """A checkpoint's configuration.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / 'config.json'} is no configuration: it holds no JSON object")
    return config


def experts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """`hidden_size`, `intermediate_size` (of one expert), `num_experts`, `top_k` and `quantization` (empty: another one).

    Raises:
        CheckpointError: it is no MoE model's, or a size is none.
    """
    text = _text(config)

    def first(*names: str) -> Any:
        return next((text[name] for name in names if text.get(name)), None)

    found = {
        "hidden_size": first("hidden_size"),
        "intermediate_size": first("moe_intermediate_size", "intermediate_size"),
        "num_experts": first("num_experts", "n_routed_experts", "num_local_experts"),
        "top_k": first("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    }
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise CheckpointError(f"config.json tells no {', '.join(missing)}: is it an MoE model's?")
    for name, value in found.items():
        if type(value) is not int or value < 1:
            raise CheckpointError(f"config.json tells {value!r} as {name}, which must be a positive whole number")
    return {**found, "quantization": _quantization(_part(config, "quantization_config") or _part(text, "quantization_config"))}


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part, which is all of it where there is no other."""
    return _part(config, "text_config") or config


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name) or {}
    if not isinstance(part, dict):
        raise CheckpointError(f"config.json tells {part!r} as {name}, which must be a JSON object")
    return part


def _quantization(quantization: Mapping[str, Any]) -> str:
    if not quantization:
        return "bf16"
    said = json.dumps(quantization).lower()
    for name in ("nvfp4", "mxfp4", "mxint4"):
        if name in said:
            return name
    if "fp8" in said or "float8" in said:
        return "fp8_block" if quantization.get("weight_block_size") else "fp8_tensor"
    return ""


def layer_of(config: Mapping[str, Any], tp: int) -> tuple[Shape, str]:
    """The MoE layer on one of ``tp`` ranks, and its weights' dtype.

    Raises:
        CheckpointError: it is no MoE model's, or the decode kernels have no form for it.
    """
    told = experts_of(config)
    text = _text(config)
    if told["quantization"] not in _DTYPES:
        other = told["quantization"] or "another format"
        raise CheckpointError(f"the decode kernel takes {', '.join(DTYPES)}; this model's experts are in {other}")
    dtype = _DTYPES[told["quantization"]]
    if dtype == "bf16" and "float16" in (text.get("torch_dtype"), text.get("dtype")):
        dtype = "fp16"
    if told["intermediate_size"] % tp:
        raise CheckpointError(f"{tp} ranks cannot share an intermediate size of {told['intermediate_size']}")
    name = str(text.get("model_type", "model"))
    shape = Shape(name, told["num_experts"], told["top_k"], told["intermediate_size"] // tp, told["hidden_size"])
    if name == "gpt_oss":
        shape = dataclasses.replace(shape, activation="swigluoai", has_bias=True)
    elif name.startswith("llama4"):
        shape = dataclasses.replace(shape, router_weight_on_input=True)
    return shape, dtype
