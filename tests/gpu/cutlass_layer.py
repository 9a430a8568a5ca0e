"""FlashInfer's CUTLASS experts beyond 8192 tokens, stock and tuned: ``python tests/gpu/cutlass_layer.py OUT.json``.

Each arm has vLLM's own warm-up of FlashInfer over a layer of its own; a captured CUDA graph keeps the tactic with which it was
captured, so that both can be replayed in turn afterwards. FlashInfer compiles the kernels the first time, which takes long;
``fused_moe_90.py`` does that beforehand, for a host without compiler.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import click

sys.path.append(str(pathlib.Path(__file__).parents[1] / "autotune"))
import real

from vllm_moe_tune_plugin.bench import experts, layer, schema, stats
from vllm_moe_tune_plugin.bench.layer import STOCK, TUNED, Arm, Machine, Program
from vllm_moe_tune_plugin.bench.shapes import Shape, draw_routing

EXPERTS = "vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe:FlashInferExperts"


@contextmanager
def looking_up(tokens: int) -> Iterator[list[tuple[int, bool]]]:
    """The bucket of each look into FlashInfer's tuned tactics, and whether a tactic was found there."""
    tuner = importlib.import_module("flashinfer.autotuner").AutoTuner
    search, asked, found = tuner.search_cache, [], []

    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = search(self, *args, **kwargs)
        found.append((asked[-1].config.dynamic_tensor_specs[0].map_to_tuning_buckets(tokens), bool(answer[0])))
        return answer

    with real.asking(asked.append), mock.patch.object(tuner, "search_cache", observed):
        yield found


def inputs(shape: Shape, tokens: int, machine: Machine) -> tuple[Any, Any, Any]:
    import torch

    x = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, device=machine.device)
    ids, weights = (part[0] for part in draw_routing(shape, "uniform", 1, tokens, machine.device))
    return x, weights, ids


def warmed_up(arm: Arm, shape: Shape, weights: experts.Weights, batched_tokens: int, machine: Machine) -> experts.Layer:
    """A layer in a process as after an engine's start: the arm entered, nothing tuned before, vLLM's warm-up run."""
    config = importlib.import_module("vllm.config")
    real.forget()
    arm.enter()
    engine = config.VllmConfig()
    engine.scheduler_config.max_num_batched_tokens = batched_tokens
    with config.set_current_vllm_config(engine), tempfile.TemporaryDirectory(prefix="tactics-") as kept:
        os.environ["VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"] = kept
        made = experts.Layer(shape, "bf16", weights, 1, machine.device, EXPERTS, max_num_tokens=batched_tokens)
        real.warm_up(batched_tokens, lambda tokens: made(*inputs(shape, tokens, machine)), managed=True)
    return made


def measure(machine: Machine, shape: Shape, batched_tokens: int, tokens: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    weights = experts.Weights.random(shape, "bf16", machine.device)
    batches = {count: inputs(shape, count, machine) for count in tokens}
    programs: dict[tuple[int, str], Program] = {}
    buckets: dict[tuple[int, str], int] = {}
    for arm in (STOCK, TUNED):
        made = warmed_up(arm, shape, weights, batched_tokens, machine)
        for count, batch in batches.items():
            program = programs[count, arm.name] = Program(arm)
            with looking_up(count) as found:
                machine.prepare(program, lambda made=made, batch=batch: [made(*batch)])
            (buckets[count, arm.name],) = {bucket if hit else 0 for bucket, hit in found}
    rows = []
    for count in tokens:
        pair = [programs[count, arm.name] for arm in (STOCK, TUNED)]
        samples: dict[str, list[float]] = {STOCK.name: [], TUNED.name: []}
        for number in range(rounds):
            for program, sample in layer.time_round(machine, pair, number):
                samples[program.arm.name].append(round(sample, 2))
        stock, tuned = (program.outputs[0].double() for program in pair)
        rows.append(
            {
                "tokens": count,
                # 0: no tuned tactic was found, FlashInfer's default ran.
                "tuned_for": {name: buckets[count, name] for name in samples},
                "median_us": {name: round(stats.median(own), 2) for name, own in samples.items()},
                "ratio": round(stats.median(stats.paired_ratios(samples[STOCK.name], samples[TUNED.name], 2)), 4),
                "difference": float((tuned - stock).norm() / stock.norm()),
                "samples_us": samples,
            }
        )
    return rows


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=pathlib.Path))
@click.option("--shape", default="qwen3-30b-a3b", show_default=True)
@click.option("--batched-tokens", default=16384, show_default=True, help="max_num_batched_tokens")
@click.option("--tokens", default="8192,12288,14336,16384", show_default=True)
@click.option("--rounds", default=20, show_default=True)
@click.option("--commit", default="")
@click.option("--no-gpu", is_flag=True, help="Down to the call of FlashInfer's C++ code; times and outputs mean nothing.")
def main(out: pathlib.Path, shape: str, batched_tokens: int, tokens: str, rounds: int, commit: str, no_gpu: bool) -> None:
    import torch

    # Off by default, since it costs memory where warm-up does not name the buckets; here it does.
    os.environ["MOE_TUNE_CUTLASS_BUCKET"] = "1"
    if no_gpu:
        real.start(plugin=False)
        machine: Machine = layer.Interpreter()
        experts.renew_workspaces(machine.device)
    else:
        machine = layer.start(interpret=False)
    counts = [int(count) for count in tokens.split(",")]
    with torch.inference_mode(), real.without_measuring() if no_gpu else nullcontext():
        rows = measure(machine, Shape.parse(shape), batched_tokens, counts, rounds)
    result = {"environment": schema.environment(commit), "shape": shape, "batched_tokens": batched_tokens, "rows": rows}
    out.write_text(json.dumps(result, indent=1))
    for row in rows:
        found = ", ".join(f"{name}: tactic of {bucket or 'nothing'}" for name, bucket in row["tuned_for"].items())
        times = " / ".join(f"{time:.0f}" for time in row["median_us"].values())
        click.echo(
            f"{row['tokens']} tokens: {times} us, ratio {row['ratio']}; {found}; outputs differ by {row['difference']:.1e}"
        )


if __name__ == "__main__":
    main()
