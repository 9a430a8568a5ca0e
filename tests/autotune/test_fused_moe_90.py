"""What tests/gpu/fused_moe_90.py has compiled, against what FlashInfer has: every kernel of bf16, and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_moe_tune_plugin.stack import installed

if str(installed("flashinfer-python")) != "0.7.2.post1":
    pytest.skip("written for FlashInfer 0.7.2.post1", allow_module_level=True)

#: Without nvcc, FlashInfer takes the version of CUDA from torch, and torch for the CPU has none.
PROGRAM = """
import json, pathlib, re, sys, torch
torch.version.cuda = "13.0"
import fused_moe_90
build = pathlib.Path(sys.argv[1])
fused_moe_90.prepare(build, build / "no-cuda", 1)
from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

def described(spec):
    text = "".join(source.read_text() for source in spec.sources if source.name.endswith(".generated.cu"))
    kernels = [" ".join(kernel.split()) for kernel in re.findall(r"(?:template void|INSTANTIATE_)[^;]*;", text)]
    return {"kernels": kernels, "sources": [str(source) for source in spec.sources], "flags": spec.extra_cuda_cflags}

print(json.dumps([described(gen_cutlass_fused_moe_sm90_module()), described(fused_moe_90.fused_moe())]))
"""


def test_every_kernel_of_bf16_is_compiled_and_no_other(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1] / "gpu", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    stock, own = json.loads(done.stdout.splitlines()[-1])
    both = ("(Sm90, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16,", "<cutlass::bfloat16_t, cutlass::bfloat16_t,")
    bf16 = {kernel for kernel in stock["kernels"] if any(operands in kernel for operands in both)}
    assert set(own["kernels"]) == bf16
    assert len(own["kernels"]) == len(bf16) == 72 + 30
    assert len(own["sources"]) == 29
    assert all(Path(source).exists() for source in own["sources"])
    assert {flag for flag in stock["flags"] if flag not in own["flags"]} == {
        "-DENABLE_FP8",
        "-DENABLE_FP8_BLOCK_SCALE",
        "-DENABLE_FP4",
    }
