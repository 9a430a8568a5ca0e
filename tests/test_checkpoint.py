"""What is read from a checkpoint's configuration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_tune_plugin import checkpoint, doctor
from vllm_moe_tune_plugin.bench import models
from vllm_moe_tune_plugin.bench.shapes import SHAPES
from vllm_moe_tune_plugin.checkpoint import CheckpointError, layer_of

QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def test_a_checkpoint_tells_its_shape():
    config = {
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "intermediate_size": 18432,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    assert checkpoint.experts_of(config) == {
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "num_experts": 256,
        "top_k": 8,
        "quantization": "fp8_block",
    }
    with pytest.raises(checkpoint.CheckpointError, match="num_experts"):
        checkpoint.experts_of({"hidden_size": 4096, "intermediate_size": 11008})


def test_layer_of_a_model() -> None:
    shape, dtype = layer_of(QWEN, tp=2)
    assert (shape.num_experts, shape.top_k, shape.intermediate, shape.hidden, dtype) == (128, 8, 384, 2048, "bf16")
    assert layer_of({**QWEN, "torch_dtype": "float16"}, 1)[1] == "fp16"
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert layer_of({**QWEN, "quantization_config": blocks}, 1)[1] == "fp8-block"
    assert layer_of({**QWEN, "model_type": "gpt_oss"}, 1)[0].has_bias
    assert layer_of({**QWEN, "model_type": "llama4_text"}, 1)[0].router_weight_on_input


@pytest.mark.parametrize(("changes", "tp"), [({"quantization_config": {"quant_method": "mxfp4"}}, 1), ({}, 5)])
def test_models_without_such_a_layer_are_told(changes: dict[str, Any], tp: int) -> None:
    with pytest.raises(CheckpointError):
        layer_of({**QWEN, **changes}, tp)


def test_what_is_no_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        checkpoint.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        checkpoint.read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no JSON object"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "2048"),
        ("moe_intermediate_size", -768),
        ("num_experts", [128, 128]),
        ("num_experts_per_tok", 8.0),
        ("text_config", "text"),
        ("quantization_config", ["fp8"]),
    ],
)
def test_what_is_no_size_is_told(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as told:
        layer_of({**QWEN, name: value}, 1)
    assert f"config.json tells {value!r} as " in str(told.value)


@pytest.mark.parametrize("name", [name for name in models.MODELS if name.removesuffix("-fp8") in SHAPES])
def test_engines_are_measured_with_the_layers_that_are_measured_alone(name: str) -> None:
    shape, dtype = layer_of(models.MODELS[name], tp=1)
    known = SHAPES[name.removesuffix("-fp8")]
    assert dataclasses.replace(shape, name=known.name) == known
    assert dtype == ("fp8-block" if name.endswith("-fp8") else "bf16")


def test_what_doctor_is_told_of_a_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN))
    assert doctor.layer_of(tmp_path, tp=2, ep=4)["problem"] == {
        "num_experts": 128,
        "local_experts": 32,
        "top_k": 8,
        "intermediate": 384,
        "hidden": 2048,
        "dtype": "bf16",
    }
    with pytest.raises(doctor.DoctorError, match="128 experts cannot be shared out to 3 ranks"):
        doctor.layer_of(tmp_path, tp=1, ep=3)
    config.write_text(json.dumps({**QWEN, "quantization_config": {"quant_method": "mxfp4"}}))
    assert "this model's experts are in mxfp4" in doctor.layer_of(tmp_path, tp=1, ep=1)["reason"]
    config.write_text(json.dumps({"hidden_size": 1}))
    with pytest.raises(doctor.DoctorError, match="is it an MoE model's"):
        doctor.layer_of(tmp_path, tp=1, ep=1)
