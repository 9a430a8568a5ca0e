"""Compile the decode kernels for Hopper, as their launches ask for it: ``python compile_decode.py``, without a GPU.

Triton's interpreter runs what its compiler refuses: a name of another type in a branch, a loop that MLIR cannot lower.
"""

from __future__ import annotations

import itertools
import json
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_moe_tune_plugin.kernels import decode_moe, scales

TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 4, 16, 4, 2048, 768
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.float8_e4m3fn: "*fp8e4nv"}


class Launches:
    """Stands for a kernel and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.calls.append((args, kwargs))


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The size of the code in bytes."""
    options = {name: kwargs.pop(name) for name in ("num_warps", "launch_pdl")}
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        kind = "constexpr"
        if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            constants[place,] = value
        elif isinstance(value, torch.Tensor):
            kind = POINTERS[value.dtype]
        else:
            kind = "fp32" if isinstance(value, float) else "i32"
        signature[parameter.name] = kind
        if kind.startswith("*") or (kind == "i32" and value % 16 == 0 and not parameter.do_not_specialize):
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"])


def compile_both(fp8: bool, mapped: bool) -> list[int]:
    """The sizes of both kernels; those of bf16 have biases, those of fp8 scales for each block."""
    weights = torch.float8_e4m3fn if fp8 else torch.bfloat16
    x = torch.empty(TOKENS, HIDDEN, dtype=weights)
    w1, w2 = torch.empty(EXPERTS, 2 * INNER, HIDDEN, dtype=weights), torch.empty(EXPERTS, HIDDEN, INNER, dtype=weights)
    block = (128, 128)
    more: dict[str, Any] = (
        {
            "x_scale": scales.of_input(torch.ones(TOKENS, HIDDEN // 128), TOKENS, HIDDEN, block),
            "w1_scale": scales.of_weight(torch.ones(EXPERTS, 2 * INNER // 128, HIDDEN // 128), w1, block),
            "w2_scale": scales.of_weight(torch.ones(EXPERTS, HIDDEN // 128, INNER // 128), w2, block),
        }
        if fp8
        else {
            "w1_bias": torch.empty(EXPERTS, 2 * INNER, dtype=torch.bfloat16),
            "w2_bias": torch.empty(EXPERTS, HIDDEN, dtype=torch.bfloat16),
        }
    )
    up, down = Launches(decode_moe._gate_up_kernel), Launches(decode_moe._down_kernel)
    with mock.patch.multiple(decode_moe, _gate_up_kernel=up, _down_kernel=down):
        decode_moe.decode_moe(
            torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16),
            x,
            w1,
            w2,
            torch.ones(TOKENS, TOP_K),
            torch.zeros(TOKENS, TOP_K, dtype=torch.int32),
            torch.empty(TOKENS * TOP_K * INNER, dtype=torch.bfloat16),
            activation="silu",
            expert_map=torch.zeros(4 * EXPERTS, dtype=torch.int32) if mapped else None,
            pdl=True,
            **more,
        )
    return [compile_launch(launches.kernel, *call) for launches in (up, down) for call in launches.calls]


def main() -> None:
    for fp8, mapped in itertools.product((False, True), repeat=2):
        print(json.dumps({"fp8": fp8, "mapped": mapped, "bytes": compile_both(fp8, mapped)}), flush=True)


if __name__ == "__main__":
    main()
