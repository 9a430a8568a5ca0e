"""Let a CPU build of vLLM serve the real TritonExperts in Triton's interpreter, and keep a journal of every process.

`install()` runs from a sitecustomize, so in each Python process of the engine, before vLLM and whatever plugins are
allowed to load. It imports neither vLLM nor torch: everything waits for the module it changes. Only a device check and
compiled operators are replaced; the experts, their Triton kernel and the engine around them are the published ones.

The journal (a file named by ENGINE_TEST_JOURNAL, one JSON object a line) tells what happened in which process:

- `start`: the process began, with its command line;
- `register`: vLLM called the plugin's entry point;
- `line`: a record passed the level of the plugin's logger, so vLLM's logging shows it;
- `experts`: a Triton GEMM of the experts was launched, with or without a sorted assignment.
"""

import inspect
import json
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import wrapt

FUSED_MOE = "vllm.model_executor.layers.fused_moe"


def note(event: str, **facts: object) -> None:
    entry = json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n"
    # One write to a descriptor opened for appending: lines of several processes do not mix.
    journal = os.open(os.environ["ENGINE_TEST_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, entry.encode())
    os.close(journal)


# ---- what the plugin does


def watch_plugin(plugin: Any) -> None:
    register = plugin.register

    def noted_register() -> None:
        note("register")
        register()

    plugin.register = noted_register


def watch_log() -> None:
    def noted_record(record: logging.LogRecord) -> bool:
        note("line", level=record.levelname, message=record.getMessage())
        return True

    # A filter, not a handler: it leaves the logger's level and handlers to vLLM and survives its dictConfig.
    logging.getLogger("vllm.moe_tune").addFilter(noted_record)


# ---- Triton without a device


def keep_triton(backends: Any) -> None:
    """CPU builds swap triton for a placeholder unless it has a backend of this name; the interpreter needs none."""
    driver = types.SimpleNamespace(is_active=lambda: False)
    backends.backends.setdefault("cpu", types.SimpleNamespace(driver=driver, compiler=None))


def serve_triton_experts(module: Any) -> None:
    """From 0.20: one device check keeps TritonExperts off the CPU."""
    import torch
    from vllm.v1.worker import workspace

    module.TritonExperts._supports_current_device = staticmethod(lambda: True)
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cpu"))  # GPU workers do it, CPU workers have no need


def serve_triton_method(module: Any) -> None:
    """Up to 0.19: the layer's method asks the platform, not the experts, and has a path of its own for the CPU."""
    import torch
    from vllm.v1.worker import workspace

    method = module.UnquantizedFusedMoEMethod
    if not hasattr(method, "_select_monolithic"):
        return
    load = method.process_weights_after_loading

    def load_for_triton(self: Any, layer: Any) -> None:
        load(self, layer)
        self._setup_kernel(layer=layer, w13=layer.w13_weight, w2=layer.w2_weight)

    module.select_unquantized_moe_backend = lambda **_: module.UnquantizedMoeBackend.TRITON
    method.is_monolithic = property(lambda self: False)
    method.process_weights_after_loading = load_for_triton
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cpu"))


def watch_experts(module: Any) -> None:
    launch = module.invoke_fused_moe_triton_kernel
    signature = inspect.signature(launch)

    def noted_launch(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        given["C"].fill_(float("nan"))  # a row that the kernel leaves out must not pass by what lay there before
        rows = given["A"].size(0) * given["top_k"]
        note("experts", assignments=rows, sorted=given["sorted_token_ids"] is not None)
        return launch(*args, **kwargs)

    module.invoke_fused_moe_triton_kernel = noted_launch


# ---- operators that exist compiled for a GPU only


def topk_softmax(weights: Any, ids: Any, source_rows: Any, logits: Any, renormalize: bool = False, *_: object) -> None:
    chosen, experts = logits.float().softmax(-1).topk(ids.size(1))
    weights.copy_(chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen)
    ids.copy_(experts)


def moe_align_block_size(
    topk_ids: Any, experts: int, block: int, order: Any, block_experts: Any, padded: Any, *options: object
) -> None:
    """Group the assignments by expert, each group padded to whole blocks with the index one past the last."""
    assert all(option is None for option in options), "neither an expert map nor a scatter is used by a lone CPU rank"
    flat = topk_ids.reshape(-1)
    order.fill_(flat.numel())
    block_experts.fill_(-1)
    end = 0
    for expert in range(experts):
        mine = (flat == expert).nonzero().reshape(-1)
        order[end : end + len(mine)] = mine
        start, end = end, end + -(-len(mine) // block) * block
        block_experts[start // block : end // block] = expert
    padded.fill_(end)


def moe_sum(rows: Any, out: Any, *_: object) -> None:
    out.copy_(rows.sum(1))


def silu_and_mul(out: Any, gate_up: Any) -> None:
    gate, up = gate_up.chunk(2, -1)
    out.copy_(gate * gate.sigmoid() * up)


def store_keys_and_values(key: Any, value: Any, keys: Any, values: Any, slots: Any, isa: str) -> None:
    block, offset = slots // keys.size(2), slots % keys.size(2)
    keys[block, :, offset] = key[: len(slots)]
    values[block, :, offset] = value[: len(slots)]


def attend(
    *, query: Any, key_cache: Any, value_cache: Any, output: Any, query_start_loc: Any, seq_lens: Any, scale: float,
    block_table: Any, **_: object,
) -> None:  # fmt: skip
    """Causal attention over a paged cache of [blocks, heads, block size, head size], a sequence at a time."""
    import torch

    starts = query_start_loc.tolist()
    for sequence, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        count = rows.stop - rows.start
        blocks = block_table[sequence, : -(-length // key_cache.size(2))]
        past, contents = (cache[blocks].transpose(0, 1).flatten(1, 2)[None, :, :length] for cache in (key_cache, value_cache))
        visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        answer = torch.nn.functional.scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None], past, contents, attn_mask=visible, scale=scale, enable_gqa=True
        )
        output[rows] = answer[0].transpose(0, 1)


def compiled(name: str) -> bool:
    """Whether the release's compiled CPU library loaded: it does only with the torch it was built for."""
    import torch

    return hasattr(torch.ops._C, name)


def rotate_natively(module: Any) -> None:
    if not compiled("rotary_embedding"):
        module.RotaryEmbedding.forward_cpu = module.RotaryEmbedding.forward_native


def map_slots_in_triton(module: Any) -> None:
    """The CPU runner puts a compiled operator in the place of a Triton kernel, for which the interpreter does."""
    if not compiled("compute_slot_mapping_kernel_impl"):
        module.CPUModelRunner._postprocess_triton = lambda self: None


def replace_operators(ops: Any) -> None:
    import torch

    ops.topk_softmax = topk_softmax
    ops.moe_align_block_size = moe_align_block_size
    ops.moe_sum = moe_sum
    if not compiled("silu_and_mul"):
        library = torch.library.Library("_C", "FRAGMENT")
        library.define("silu_and_mul(Tensor! out, Tensor input) -> ()")
        library.impl("silu_and_mul", silu_and_mul, "CPU")
        ops.keeps_the_operator_defined = library
        ops.cpu_attn_get_scheduler_metadata = lambda **_: torch.empty(0)
        ops.cpu_attn_reshape_and_cache = store_keys_and_values
        ops.cpu_attention_with_kv_cache = attend


def install() -> None:
    note("start", command=sys.orig_argv)
    watch_log()
    hooks: dict[str, Callable[[Any], None]] = {
        "vllm_moe_tune_plugin": watch_plugin,
        "triton.backends": keep_triton,
        "vllm._custom_ops": replace_operators,
        "vllm.model_executor.layers.rotary_embedding.base": rotate_natively,
        "vllm.v1.worker.cpu_model_runner": map_slots_in_triton,
        f"{FUSED_MOE}.experts.triton_moe": serve_triton_experts,
        f"{FUSED_MOE}.unquantized_fused_moe_method": serve_triton_method,
        f"{FUSED_MOE}.fused_moe": watch_experts,
    }
    for name, hook in hooks.items():
        wrapt.register_post_import_hook(hook, name)
