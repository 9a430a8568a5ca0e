"""A vLLM or FlashInfer of the future: what the plugin does not know is reported with a reason, and runs as stock."""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import fake_stack
import pytest
import torch
from fake_stack import EXPERTS, FUSED_MOE, STACK, replaced, without

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin.tunings import tuple_routing

IDS, WEIGHTS = torch.tensor([[1, 2]]), torch.tensor([[0.7, 0.3]])
PACK = tuple_routing.PACK


def experts(module: str, name: str, *more: Any) -> Callable[[], Any]:
    """What FlashInfer gets from one layer, in a form that can be compared."""

    def call() -> Any:
        core = importlib.import_module("flashinfer.fused_moe.core")
        getattr(importlib.import_module(f"{EXPERTS}.{module}"), name)().apply(None, IDS, WEIGHTS, *more)
        kernel, ids, tokens = core.CALLS[-1]
        return kernel, [part.tolist() for part in ids] if isinstance(ids, tuple) else ids.tolist(), tokens

    return call


def triton(ids_name: str = "topk_ids") -> Callable[[], Any]:
    def call() -> Any:
        module = importlib.import_module(f"{FUSED_MOE}.fused_moe")
        weights = torch.empty(64, 1)
        arguments = {"output": None, "w1": weights, "w2": weights, ids_name: IDS, "global_num_experts": 64}
        result = module.TritonExperts().apply(**arguments)
        return result if isinstance(result[0], str) else "unsorted"

    return call


class Future(NamedTuple):
    sources: dict[str, str]
    #: The patch that loses its place and a word of its reason.
    target: str
    reason: str
    #: The call that must be as without the plugin.
    call: Callable[[], Any]


NVFP4 = experts("trtllm_nvfp4_moe", "TrtLlmNvFp4ExpertsModular")
MXFP4 = experts("trtllm_mxfp4_moe", "TrtLlmMxfp4ExpertsModular", 64)
LORA = experts("trtllm_lora_moe", "TrtLlmBf16LoRAExperts")
FP8 = experts("trtllm_fp8_moe", "TrtLlmFp8ExpertsModular")

FUTURES = {
    "module gone: LoRA": Future(
        without(f"{EXPERTS}.trtllm_lora_moe"),
        f"{EXPERTS}.trtllm_lora_moe:TrtLlmBf16LoRAExperts.invoke_routed_moe",
        "no such experts",
        lambda: None,
    ),
    "module gone: config": Future(
        without(f"{FUSED_MOE}.config"), f"{FUSED_MOE}.config:FusedMoEConfig.__post_init__", "no such code", lambda: MXFP4()[2]
    ),
    "module gone: fused_moe": Future(
        without(f"{FUSED_MOE}.fused_moe"), f"{FUSED_MOE}.fused_moe:TritonExperts.apply", "no such code", lambda: None
    ),
    "module gone: FlashInfer's autotuner": Future(
        {
            **without("flashinfer.autotuner"),
            "flashinfer": STACK["flashinfer"].replace("autotuner, ", ""),
        },
        f"{EXPERTS}.trtllm_fp8_moe:{PACK}",
        "",
        FP8,
    ),
    "class renamed: LoRA": Future(
        replaced(f"{EXPERTS}.trtllm_lora_moe", ("TrtLlmBf16LoRAExperts", "TrtLlmLoRA")),
        f"{EXPERTS}.trtllm_lora_moe:TrtLlmBf16LoRAExperts.invoke_routed_moe",
        "no such experts",
        experts("trtllm_lora_moe", "TrtLlmLoRA"),
    ),
    "class renamed: NVFP4": Future(
        replaced(f"{EXPERTS}.trtllm_nvfp4_moe", ("TrtLlmNvFp4ExpertsModular", "NvFp4Modular")),
        f"{EXPERTS}.trtllm_nvfp4_moe:TrtLlmNvFp4ExpertsModular._invoke_kernel",
        "launches NVFP4 batches whole",
        lambda: None,
    ),
    "class renamed: TritonExperts": Future(
        {
            **STACK,
            f"{FUSED_MOE}.fused_moe": STACK[f"{FUSED_MOE}.fused_moe"].replace("TritonExperts", "TileExperts")
            + "\nFirst = TileExperts\n",
        },
        f"{FUSED_MOE}.fused_moe:TritonExperts.apply",
        "no such code",
        lambda: importlib.import_module(f"{FUSED_MOE}.fused_moe").First().apply(None, *[torch.empty(64, 1)] * 2, IDS, 64),
    ),
    "parameter renamed: tune_max_num_tokens": Future(
        {
            **STACK,
            "flashinfer.fused_moe.core": STACK["flashinfer.fused_moe.core"].replace("tune_max_num_tokens", "tune_tokens"),
        },
        "flashinfer.fused_moe:trtllm_fp8_block_scale_routed_moe",
        "no parameter 'tune_max_num_tokens'",
        lambda: importlib.import_module("flashinfer").trtllm_fp8_block_scale_routed_moe(IDS, None),
    ),
    "parameter renamed: ids of TritonExperts": Future(
        replaced(
            f"{FUSED_MOE}.fused_moe",
            (
                "w1, w2, topk_ids, global_num_experts=-1, expert_map=None, inside",
                "w1, w2, ids, global_num_experts=-1, expert_map=None, inside",
            ),
            ("inside()\n        return moe_align_block_size(topk_ids", "inside()\n        return moe_align_block_size(ids"),
        ),
        f"{FUSED_MOE}.fused_moe:TritonExperts.apply",
        "topk_ids",
        triton("ids"),
    ),
    "parameter renamed: packing": Future(
        replaced(
            f"{FUSED_MOE}.utils",
            ("weights(topk_ids, topk_weights, block", "weights(ids, topk_weights, block"),
            ("kernel(topk_ids,", "kernel(ids,"),
        ),
        f"{EXPERTS}.trtllm_fp8_moe:{PACK}",
        "topk_ids",
        lambda: FP8()[:2],
    ),
    "parameter renamed: ids of an experts class": Future(
        replaced(
            f"{EXPERTS}.trtllm_fp8_moe",
            ("(self, hidden_states, topk_ids,", "(self, hidden_states, ids,"),
            ("trtllm_moe_pack_topk_ids_weights(topk_ids, topk_weights)", "(ids << 16)"),
            ("from vllm.model_executor.layers.fused_moe.utils import trtllm_moe_pack_topk_ids_weights", ""),
        ),
        f"{EXPERTS}.trtllm_fp8_moe:TrtLlmFp8ExpertsModular.apply",
        "topk_ids",
        lambda: FP8()[:2],
    ),
    "parameter renamed: experts of MXFP4": Future(
        replaced(
            f"{EXPERTS}.trtllm_mxfp4_moe",
            ("topk_weights, global_num_experts):\n        from", "topk_weights, num_experts):\n        from"),
        ),
        f"{EXPERTS}.trtllm_mxfp4_moe:TrtLlmMxfp4ExpertsModular._invoke_kernel",
        "global_num_experts",
        lambda: None,
    ),
    "another signature: FlashInfer takes an object": Future(
        {
            **STACK,
            "flashinfer.fused_moe.core": STACK["flashinfer.fused_moe.core"]
            + """
class Options:
    tune_max_num_tokens = 8192

def trtllm_fp8_block_scale_routed_moe(topk_ids, hidden_states, options=Options()):
    CALLS.append(("trtllm_fp8_block_scale_routed_moe", topk_ids, options.tune_max_num_tokens))
""",
        },
        "flashinfer.fused_moe:trtllm_fp8_block_scale_routed_moe",
        "no parameter 'tune_max_num_tokens'",
        lambda: FP8()[2],
    ),
    "another signature: packing takes one object": Future(
        {
            **STACK,
            f"{FUSED_MOE}.utils": "def trtllm_moe_pack_topk_ids_weights(routing, *, kernel=None): return routing[0]\n",
            f"{EXPERTS}.trtllm_fp8_moe": STACK[f"{EXPERTS}.trtllm_fp8_moe"].replace(
                "(topk_ids, topk_weights)\n", "((topk_ids, topk_weights))\n"
            ),
        },
        f"{EXPERTS}.trtllm_fp8_moe:{PACK}",
        "topk_ids",
        lambda: FP8()[:2],
    ),
    "another signature: a foreign wrapper without one": Future(
        {
            **STACK,
            f"{FUSED_MOE}.fused_moe": STACK[f"{FUSED_MOE}.fused_moe"]
            + """
def traced(function):
    return lambda *args, **kwargs: function(*args, **kwargs)

moe_align_block_size = traced(moe_align_block_size)
""",
        },
        f"{FUSED_MOE}.fused_moe:moe_align_block_size",
        "topk_ids",
        triton(),
    ),
    "a class in place of a function": Future(
        {
            **STACK,
            "flashinfer.fused_moe.core": STACK["flashinfer.fused_moe.core"]
            + """
class Kernel:
    def __call__(self, topk_ids, hidden_states, options=None):
        CALLS.append(("trtllm_fp8_block_scale_routed_moe", topk_ids, 8192))

trtllm_fp8_block_scale_routed_moe = Kernel()
""",
        },
        "flashinfer.fused_moe:trtllm_fp8_block_scale_routed_moe",
        "no parameter 'tune_max_num_tokens'",
        lambda: FP8()[2],
    ),
}


@pytest.mark.parametrize("name", FUTURES)
def test_reported_and_stock(install, name):
    future = FUTURES[name]
    install(future.sources)
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    record = fake_stack.patches()[future.target]
    assert str(record.state) in ("unsupported", "failed")
    assert future.reason in record.reason
    assert record.reason
    with_plugin = future.call()
    vllm_moe_tune_plugin.unregister()
    assert future.call() == with_plugin


@pytest.mark.parametrize("name", [name for name in FUTURES if name.startswith(("parameter", "another"))])
def test_an_unknown_signature_is_unsupported_and_the_rest_of_the_tuning_goes_on(install, name):
    """Nothing of ours broke: the code there is not what the tuning is for. `doctor` must not fail for it."""
    future = FUTURES[name]
    install(future.sources)
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    assert str(fake_stack.patches()[future.target].state) == "unsupported"
    assert "failed" not in fake_stack.states().values()


def test_the_futures_differ_from_the_present(install):
    """Each call above does change with the plugin in the stack as it is."""
    install()
    fake_stack.load()
    calls = {"nvfp4": NVFP4, "mxfp4": MXFP4, "lora": LORA, "fp8": FP8, "triton": triton()}
    before = {name: call() for name, call in calls.items()}
    vllm_moe_tune_plugin.register()
    importlib.import_module(f"{FUSED_MOE}.config").FusedMoEConfig()
    assert [name for name, call in calls.items() if call() == before[name]] == []


def test_a_flashinfer_that_moved_its_functions(install):
    """The whole package is another one; the engine starts all the same."""
    install({**without(*(name for name in STACK if name.startswith("flashinfer."))), "flashinfer": "moe = None\n"})
    vllm_moe_tune_plugin.register()
    fake_stack.load(f"{FUSED_MOE}.fused_moe", f"{EXPERTS}.trtllm_lora_moe", "flashinfer")
    states = fake_stack.states()
    assert states["autotune_bucket"] == states["tuple_routing"] == "unsupported"
    assert states["low_latency_assignment"] == "applied"


@pytest.mark.parametrize("module", [f"{FUSED_MOE}.fused_moe", f"{EXPERTS}.trtllm_fp8_moe", "flashinfer.fused_moe.core"])
def test_an_import_error_of_theirs_stays_theirs(install, module):
    """And a second attempt, once it is mended, is patched."""
    install({**STACK, module: "import no_such_module_at_all\n"})
    vllm_moe_tune_plugin.register()
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        importlib.import_module(module)
    assert "failed" not in fake_stack.states().values()
    file = pathlib.Path(sys.path[0]).joinpath(*module.split(".")).with_suffix(".py")
    file.write_text(STACK[module])
    importlib.invalidate_caches()
    fake_stack.load()
    assert set(fake_stack.states().values()) == {"applied"}
