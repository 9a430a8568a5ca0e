"""Models for ``bench engine`` that need no download: a config.json with a known model's figures, and weights at random."""

from __future__ import annotations

import importlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

_QWEN3_MOE: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

_QWEN3_NEXT: Mapping[str, Any] = {
    **{name: value for name, value in _QWEN3_MOE.items() if name not in ("max_window_layers", "sliding_window")},
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 256,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
}

_MIXTRAL: Mapping[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}


#: What stays in bf16 in Qwen's own fp8 checkpoints, in each layer that has it.
_KEPT = ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.conv1d", "linear_attn.in_proj_ba")


def _fp8_block(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with weights in fp8 as Qwen publishes them."""
    layers = range(config["num_hidden_layers"])
    kept = ["lm_head", *(f"model.layers.{layer}.{module}" for layer in layers for module in _KEPT)]
    return {
        **config,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": kept,
        },
    }


MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3_MOE,
    "qwen3-30b-a3b-fp8": _fp8_block(_QWEN3_MOE),
    "qwen3-next-80b-a3b": _QWEN3_NEXT,
    "qwen3-next-80b-a3b-fp8": _fp8_block(_QWEN3_NEXT),
    "mixtral-8x7b": _MIXTRAL,
    # Small enough for a test on a CPU. The vocabulary holds the token ids that vLLM's latency benchmark draws.
    "tiny": {
        **_QWEN3_MOE,
        "hidden_size": 64,
        "head_dim": 32,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": 24,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "max_window_layers": 2,
        "max_position_embeddings": 256,
        "vocab_size": 10240,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def make(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Write a named model into a folder of its own below ``folder``."""
    model = folder / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODELS[name], indent=1))
    return model


def add_tokenizer(model: pathlib.Path) -> None:
    """Give a model without one a tokenizer of one word for each token id: ``bench serve`` sends text."""
    # By name: it is vLLM's dependency, which a machine that checks types need not have.
    tokenizers = importlib.import_module("tokenizers")

    size = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{index}": index for index in range(size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t2", "bos_token": "t1"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
