"""What ``cutlass_layer.py`` has FlashInfer compile, compiled without a GPU: ``python tests/gpu/fused_moe_90.py OUT``.

FlashInfer compiles `fused_moe_90` where it is first used, 248 sources for all dtypes, and `trtllm_utils` for its autotuner.
This makes both beforehand, the first for bf16 alone: 29 sources, which take 40 minutes of one core. A run that was stopped goes
on where it was. It takes g++ and an environment of its own, with nvcc from PyPI; torch for the CPU will do::

    pip install --no-deps flashinfer-python==0.7.2.post1
    pip install apache-tvm-ffi==0.1.11 click ninja numpy nvidia-ml-py packaging requests torch tqdm
    pip install nvidia-cuda-{nvcc,crt,runtime,cccl,nvrtc}=='13.0.*' nvidia-{nvvm,cublas}=='13.0.*' nvidia-curand

The host needs the same FlashInfer and apache-tvm-ffi, CUDA 13 and a C library no older than this machine's, but no compiler.
There OUT/NAME/NAME.so is put at SITE-PACKAGES/flashinfer/data/aot/NAME/NAME.so, for both names, and these are set:
``FLASHINFER_DISABLE_JIT=1``, so that FlashInfer says what else it would compile, and ``VLLM_HAS_FLASHINFER_CUBIN=1``, without
which vLLM does not use FlashInfer where there is no nvcc.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import shutil
import sysconfig
from collections.abc import Callable
from typing import Any

import click

#: In the place of cutlass_fused_moe_instantiation.cu, which makes the runners of all dtypes.
RUNNER = """
// The included file names it also where its declaration is left out: without ENABLE_FP8.
#define use_fp8_input false
#include "cutlass_fused_moe_kernels.cuh"
#include "moe_kernels.h"

namespace tensorrt_llm::kernels::cutlass_kernels {
template class CutlassMoeFCRunner<__nv_bfloat16, __nv_bfloat16>;
INSTANTIATE_FINALIZE_MOE_ROUTING(__nv_bfloat16, __nv_bfloat16, __nv_bfloat16);
}
"""


def without_other_runners(binding: str) -> str:
    """The binding with the runner of bf16 alone; it tells who asks for another that it could not construct one."""
    others = r"std::make_shared<kernels::CutlassMoeFCRunner<(half, half|\w+, cutlass::uint4b_t)>>\(\)"
    binding, count = re.subn(others, "nullptr", binding)
    if count != 5:
        raise click.ClickException(f"this FlashInfer makes {count} runners of fp16 and int4 instead of 5: not made for it")
    return binding


def only_bf16(generate: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """FlashInfer's list of kernels to instantiate, less those that read or multiply anything else."""

    def generated(is_arch_enabled: Any) -> list[Any]:
        from flashinfer.jit.gemm.cutlass.cutlass_library import DataType

        kept = []
        for operation in generate(is_arch_enabled):
            # `dtype` is that of both operands, in the kernels for older GPUs to which the runner falls back.
            dtypes = {vars(operation).get(name) for name in ("dtype", "act_type", "weight_type")}
            if dtypes - {None} == {DataType.bf16}:
                kept.append(operation)
        return kept

    return generated


def fused_moe() -> Any:
    """FlashInfer's own specification, with fewer sources and without the flags of what is left out."""
    from flashinfer.jit import env
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module
    from flashinfer.jit.gemm.cutlass import generate_kernels
    from flashinfer.jit.utils import write_if_different

    for name in ("generate_sm80_operations", "generate_sm90_operations"):
        setattr(generate_kernels, name, only_bf16(getattr(generate_kernels, name)))
    spec = gen_cutlass_fused_moe_sm90_module()
    stock, own = env.FLASHINFER_CSRC_DIR / "fused_moe" / "cutlass_backend", env.FLASHINFER_GEN_SRC_DIR / "bf16"
    binding = "flashinfer_cutlass_fused_moe_binding.cu"
    changed = {"cutlass_fused_moe_instantiation.cu": RUNNER, binding: without_other_runners((stock / binding).read_text())}
    for name, text in changed.items():
        write_if_different(own / name, text)
    kept = [source for source in spec.sources if not re.match("moe_gemm_kernels_(?!bf16_bf16)", source.name)]
    spec.sources = [own / source.name if source.name in changed else source for source in kept]
    spec.extra_cuda_cflags = [flag for flag in spec.extra_cuda_cflags if not re.match("-DENABLE_FP[48]", flag)]
    spec.extra_include_dirs.append(stock)
    return spec


def prepare(build: pathlib.Path, cuda: pathlib.Path, jobs: int) -> None:
    """The environment in which FlashInfer builds for Hopper with the packages' CUDA."""
    libraries = build / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    # Scripts for the linker: the packages' files have other names than it looks for, and of the last two nothing is used.
    for name, script in {"cudart": f"INPUT({cuda}/lib/libcudart.so.13)", "cuda": "", "nvrtc": ""}.items():
        (libraries / f"lib{name}.so").write_text(script)
    os.environ |= {
        "CUDA_HOME": str(cuda),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(build),
        "MAX_JOBS": str(jobs),
        "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
        # Read by the linker. The second is where the CUDA packages are, seen from SITE-PACKAGES/flashinfer/data/aot/NAME.
        "LIBRARY_PATH": str(libraries),
        "LD_RUN_PATH": "$ORIGIN/../../../../nvidia/cu13/lib",
    }


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=pathlib.Path))
@click.option("--jobs", default=2, show_default=True, help="Compilers at a time, of up to 6 GB each.")
def main(out: pathlib.Path, jobs: int) -> None:
    cuda = pathlib.Path(sysconfig.get_path("purelib"), "nvidia", "cu13")
    prepare(out.absolute() / "build", cuda, jobs)
    from flashinfer.jit.tllm_utils import gen_trtllm_utils_module

    for spec in (gen_trtllm_utils_module(), fused_moe()):
        click.echo(f"{spec.name}: {len(spec.sources)} sources")
        spec.build(verbose=True)
        product = out / spec.name / f"{spec.name}.so"
        product.parent.mkdir(exist_ok=True)
        shutil.copy2(spec.jit_library_path, product)
        # Where it lies now, it does not find CUDA's library itself. A symbol that is missing is an error here, not on the host.
        for library in (cuda / "lib" / "libcudart.so.13", product.absolute()):
            ctypes.CDLL(str(library))


if __name__ == "__main__":
    main()
