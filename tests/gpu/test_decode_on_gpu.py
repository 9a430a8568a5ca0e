"""The decode kernels compiled for the GPU, with programmatic dependent launch where it has it, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_decode_moe import draw, reference, run_fp8
from test_decode_moe import run as run_kernels

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

PDL = torch.cuda.get_device_capability() >= (9, 0)
SHAPES = {"qwen3-30b-a3b": (2048, 768, 8), "odd": (2880, 1440, 4), "narrow": (96, 40, 2)}


def run(problem: Any) -> torch.Tensor:
    from vllm_moe_tune_plugin.kernels import decode_moe

    return run_kernels(decode_moe, problem, device="cuda", pdl=PDL)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_float64(dtype: torch.dtype, shape: str, tokens: int) -> None:
    hidden, inner, top_k = SHAPES[shape]
    problem = draw(tokens, hidden, inner, dtype=dtype, experts=16, top_k=top_k, absent=0.1, mapped=tokens == 3)
    expected = reference(problem)
    error = float((run(problem).double() - expected).norm())
    # Of a few tokens all experts may be absent: what is expected is zero, then.
    assert error <= (5e-3 if dtype == torch.bfloat16 else 1e-3) * float(expected.norm())


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swigluoai", "relu2_no_mul"])
def test_activations(activation: str) -> None:
    problem = draw(4, 512, 256, activation, dtype=torch.bfloat16, biased=True)
    expected = reference(problem)
    assert float((run(problem).double() - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.parametrize(("block", "channels"), [(None, False), (None, True), ([128, 128], False)])
@pytest.mark.parametrize(("hidden", "inner"), [(2048, 768), (1152, 144)])
def test_fp8(hidden: int, inner: int, block: list[int] | None, channels: bool) -> None:
    from vllm_moe_tune_plugin.kernels import decode_moe

    more = {"mapped": True, "absent": 0.2, "experts": 16, "top_k": 8}
    run_fp8(decode_moe, hidden, inner, block, channels, device="cuda", pdl=PDL, allowed=1e-4, **more)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_shared_out(shape: str, tokens: int, ranks: int) -> None:
    """Each rank's part against float64, also where all pairs are its own, and the same bits however many rows a tile has."""
    from vllm_moe_tune_plugin.kernels import decode_moe

    hidden, inner, top_k = SHAPES[shape]
    problem = draw(tokens, hidden, inner, dtype=torch.bfloat16, experts=16, top_k=top_k)
    tiles = decode_moe.choose_tiles(hidden, inner, top_k, 2, tokens, 132, 1)
    problem.expert_map = torch.full((16 * ranks,), -1, dtype=torch.int32)
    problem.expert_map[:16] = torch.randperm(16, dtype=torch.int32)
    for everywhere in (16, 16 * ranks):
        problem.ids = torch.stack([torch.randperm(everywhere)[:top_k] for _ in range(tokens)]).int()
        expected, own = reference(problem), run(problem)
        assert float((own.double() - expected).norm()) <= 5e-3 * float(expected.norm())
        for rows in (1, 2, 4):
            other = dataclasses.replace(tiles, up_rows=rows, down_rows=rows, down_ahead=rows)
            assert torch.equal(run_kernels(decode_moe, problem, other, device="cuda", pdl=PDL), own)


def test_the_same_bits_every_time() -> None:
    problem = draw(8, 2048, 768, dtype=torch.bfloat16, experts=16, top_k=8)
    first = run(problem)
    assert all(torch.equal(first, run(problem)) for _ in range(20))
