"""Measure what the issues and the README tell: ``python tests/gpu/measure.py OUT --python 0.33.0=PYTHON ... [NAME ...]``.

Each job is a ``vllm-moe-tune bench`` in the environment of one vLLM release, whose Python is given. Jobs run side by side, as
many as there are GPUs for; a job of several GPUs waits for them. A job goes on from the file that an earlier call left in
OUT, so that little is lost where the time is over: all that still runs is then asked to end, which saves finished runs.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import click

#: Long enough for decode to be most of it. One batch a turn: arms that alternate often share what disturbs them.
LENGTHS = ("--together", "--iterations", "1", "--warmup", "1", "--output-len", "256", "--greedy-tokens", "24")
#: Of each GPU: enough for all batches here. Two engines that need not measure what is left for it can start at once.
KV_CACHE = ("--kv-cache-memory-bytes", str(4 << 30))
#: Beyond decode's sizes, since prefill outside CUDA graphs waits for the host.
CAPTURED = ("1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1024")
GRAPHS = ("--max-model-len", "4096", "--cudagraph-capture-sizes", *CAPTURED)
#: What it takes from being asked to end until an engine has left its GPU.
GRACE_S = 45.0
POLL_S = 0.2


@dataclass(frozen=True)
class Job:
    """One file of results: ``bench`` with these words in the environment of this vLLM."""

    name: str
    vllm: str
    words: Sequence[str]
    gpus: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)


def engine(name: str, model: str, *arguments: str, batch: str, pairs: int = 4, dp: int = 1, tp: int = 1, **environ: str) -> Job:
    """``name`` begins with the release: `0.33.0-tp2`."""
    words = ["engine", model, "--batch", batch, "--pairs", str(pairs), "--dp", str(dp), *LENGTHS, "--", *GRAPHS]
    words += ["--tensor-parallel-size", str(tp), *arguments]
    return Job(f"engine-{name}", name.partition("-")[0], words, dp * tp, environ)


def layers(name: str, *arguments: str, **environ: str) -> Job:
    words = ["layer", "--dtype", "bf16,fp8-block", "--routing", "uniform", "--seconds", "0.2", *arguments]
    return Job(name, "0.33.0", words, environ=environ)


QWEN, NEXT = "qwen3-30b-a3b", "qwen3-next-80b-a3b"
#: The layers of which one of several ranks is measured; the last is DeepSeek-V3.
SHARED = (QWEN, NEXT, "qwen3.5-35b-a3b", "glm-4.5-air", "gpt-oss-120b", "256,8,2048,7168")
ONE_OF_RANKS = (*(word for shape in SHARED for word in ("--shape", shape)), "--ep", "2,4,8", "--tokens", "1,2,4,8,16")
#: The experts that serve one GPU: for fp8 blocks vLLM would take FlashInfer's CUTLASS experts here, and compile them first.
EXPERTS = ("--enable-expert-parallel", "--moe-backend", "triton")
#: fp8 models: DeepGEMM would compile its kernels for minutes, in both arms.
NO_JIT = {"VLLM_USE_DEEP_GEMM": "0"}
#: Tensor parallelism: FlashInfer's all-reduce is compiled, too, and stock's own serves both arms as well.
NO_FUSION = ("--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}')
NO_ALLREDUCE = {"VLLM_ALLREDUCE_USE_FLASHINFER": "0"}

JOBS = (
    engine("0.19.1", QWEN, batch="1,2,4,8,16,32"),
    engine("0.33.0", QWEN, batch="1,2,4,8,16,32,64"),
    engine("0.26.0", QWEN, batch="1,2,4,8,16,32"),
    engine("0.33.0-fp8", f"{QWEN}-fp8", batch="1,2,4,8,16", **NO_JIT),
    engine("0.33.0-no-decode-kernel", QWEN, batch="1,2,4", MOE_TUNE_DISABLE="decode_kernel"),
    Job(
        "serve-0.33.0",
        "0.33.0",
        ("engine", QWEN, "--serve", "--batch", "4,16", "--pairs", "1", "--output-len", "128", "--", *GRAPHS),
    ),
    layers("layer-0.33.0"),
    layers("repeat/layer-0.33.0"),
    layers("layer-0.33.0-ep", *ONE_OF_RANKS),
    layers("expert-parallel/layer-0.33.0-all-tokens", *ONE_OF_RANKS, MOE_TUNE_DECODE_TOKENS="16"),
    *(
        engine(f"0.33.0{short}-{name}", model, *KV_CACHE, *arguments, batch="1,4,16", pairs=3, dp=dp, tp=tp, **environ)
        for name, dp, tp, arguments in (
            ("tp2", 1, 2, NO_FUSION),
            ("dp2-ep2", 2, 1, EXPERTS),
            ("tp4", 1, 4, NO_FUSION),
            ("dp4-ep4", 4, 1, EXPERTS),
            ("dp2-tp2", 2, 2, NO_FUSION),
        )
        for short, model, environ in (
            ("", QWEN, NO_ALLREDUCE),
            ("-fp8", f"{QWEN}-fp8", NO_JIT | NO_ALLREDUCE),
            ("-next", NEXT, NO_ALLREDUCE),
            ("-next-fp8", f"{NEXT}-fp8", NO_JIT | NO_ALLREDUCE),
        )
        # Both arms' weights of Qwen3-Next in bf16 take 320 GB.
        if (model, dp * tp) != (NEXT, 2)
    ),
)


@dataclass
class Run:
    job: Job
    gpus: Sequence[str]
    process: subprocess.Popen[bytes]
    begin: float = field(default_factory=time.monotonic)


def start(job: Job, gpus: Sequence[str], python: str, out: pathlib.Path, commit: str) -> Run:
    path = out / f"{job.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    end = job.words.index("--") if "--" in job.words else len(job.words)
    own = ["-o", str(path), *(["--commit", commit] if commit else [])]
    own += ["--logs", str(path.with_suffix(""))] if job.words[0] == "engine" else []
    command = [python, "-m", "vllm_moe_tune_plugin", "bench", *job.words[:end], *own, *job.words[end:]]
    environ = {**os.environ, **job.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with path.with_suffix(".log").open("ab") as log:
        return Run(job, gpus, subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT))


def parse_pythons(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    where = {}
    for value in values:
        vllm, _equals, python = value.partition("=")
        if shutil.which(python) is None:
            raise click.BadParameter(f"{value!r}: VLLM=PYTHON must name an interpreter that can be run")
        where[vllm] = python
    return where


def why_not(job: Job, where: Mapping[str, str], gpus: int) -> str:
    """What is missing for a job, empty where nothing is."""
    if job.vllm not in where:
        return f"{job.name} needs vLLM {job.vllm}: give --python {job.vllm}=PYTHON"
    if job.gpus > gpus:
        return f"{job.name} needs {job.gpus} GPUs: name them by --gpus"
    return ""


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=pathlib.Path))
@click.argument("names", nargs=-1)
@click.option(
    "--python",
    "where",
    multiple=True,
    required=True,
    metavar="VLLM=PYTHON",
    callback=parse_pythons,
    help="Where a release is installed.",
)
@click.option("--gpus", default="0", show_default=True, help="GPUs, separated by commas.")
@click.option("--limit", default=3600.0, show_default=True, help="Seconds after which everything is asked to end.")
@click.option("--commit", default="", help="The plugin's commit, where its folder is no checkout.")
def main(out: pathlib.Path, names: Sequence[str], where: Mapping[str, str], gpus: str, limit: float, commit: str) -> None:
    """Run the jobs NAME... (without any: all that can be had), each on GPUs of its own."""
    known = {job.name: job for job in JOBS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError(f"no job {', '.join(unknown)}; there are {', '.join(known)}")
    free = gpus.split(",")
    missing = list(filter(None, (why_not(known[name], where, len(free)) for name in names)))
    if missing:
        raise click.UsageError("; ".join(missing))
    waiting = [known[name] for name in names] or [job for job in JOBS if not why_not(job, where, len(free))]
    running: list[Run] = []
    outcomes: dict[str, str] = {}
    deadline = time.monotonic() + limit
    while (waiting or running) and time.monotonic() < deadline:
        # In order: a job of several GPUs is not overtaken by those of one, which would keep it waiting.
        while waiting and waiting[0].gpus <= len(free):
            job = waiting.pop(0)
            running.append(start(job, free[: job.gpus], where[job.vllm], out, commit))
            free = free[job.gpus :]
        for run in [run for run in running if run.process.poll() is not None]:
            running.remove(run)
            free += run.gpus
            seconds = time.monotonic() - run.begin
            outcomes[run.job.name] = f"{'finished' if run.process.returncode == 0 else 'FAILED'} after {seconds:.0f} s"
        time.sleep(POLL_S)
    for run in running:
        run.process.terminate()
        outcomes[run.job.name] = "stopped, the time is over"
    end = time.monotonic() + GRACE_S
    for run in running:
        try:
            run.process.wait(timeout=max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            run.process.kill()
            outcomes[run.job.name] = "killed: an engine may still hold its GPU"
    outcomes |= {job.name: "not begun" for job in waiting}
    for name, outcome in outcomes.items():
        click.echo(f"{name}: {outcome}")
    sys.exit(1 if any("FAILED" in outcome or "killed" in outcome for outcome in outcomes.values()) else 0)


if __name__ == "__main__":
    main()
