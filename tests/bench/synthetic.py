"""Files of results with invented figures, as `bench` would write them: for tests of what reads them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from vllm_moe_tune_plugin.bench import engine, layer, schema, stats
from vllm_moe_tune_plugin.bench.shapes import SHAPES, Shape
from vllm_moe_tune_plugin.expert_load import distinct_experts

BANDWIDTH = 4e12
ENVIRONMENT = {
    "time": "2030-01-02T03:04:05+00:00",
    "gpu": "NVIDIA H200",
    "gpu_id": "0123456789ab",
    "driver": "570.1",
    "gpu_count": 1,
    "python": "3.12.1",
    "vllm": "0.19.1",
    "flashinfer-python": "0.6.6",
    "torch": "2.10.0",
    "triton": "3.6.0",
    "wrapt": "2.1.1",
    "plugin": "0.1.0",
    "commit": "abcdef012345",
    "settings": {},
}


def layer_results(
    shapes: Sequence[Shape] = tuple(SHAPES.values()),
    tokens: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    dtypes: Sequence[str] = ("bf16", "fp8-block"),
    routings: Sequence[str] = ("uniform", "skewed"),
    rounds: int = 12,
    control: bool = False,
    **environment: Any,
) -> dict[str, Any]:
    draw = random.Random(str((dtypes, rounds)))
    arms = [layer.STOCK, layer.CONTROL, layer.TUNED] if control else [layer.STOCK, layer.TUNED]
    job = layer.Job(shapes, dtypes, tokens, routings, (1,), arms=arms)
    known = {shape.name: shape for shape in shapes}
    rows = []
    for key in job.row_keys():
        shape, count = known[key["shape"]], key["tokens"]
        row: dict[str, Any] = {"key": key, "problem": layer._problem(shape)}
        problem = shape.refusal(key["dtype"], 1)
        if problem:
            rows.append(row | {"status": "unsupported", "reason": problem})
            continue
        distinct = distinct_experts(count, shape.top_k, shape.num_experts)
        moved = distinct * shape.expert_bytes(key["dtype"]) + shape.activation_bytes(count)
        limit = moved / BANDWIDTH * 1e6
        slow = {"stock": 1.25 * limit + 12, "control": 1.25 * limit + 12, "tuned": 1.2 * limit + 12 - 4 / count**0.5}
        samples = {arm.name: [round(slow[arm.name] * draw.gauss(1, 0.01), 3) for _ in range(2 * rounds)] for arm in arms}
        row |= {
            "status": "ok",
            "layers": 16,
            "calls": 16,
            "samples_us": samples,
            "median_us": {name: round(stats.median(own), 3) for name, own in samples.items()},
            "spread_us": {name: round(stats.spread(own), 3) for name, own in samples.items()},
            "distinct_experts": round(distinct, 2),
            "bytes": int(moved),
            "limit_us": round(limit, 3),
            "relative_error": {arm.name: 0.003 for arm in arms},
            "tunings": {"low_latency_assignment": {"state": "applied", "tuned": 32}},
        }
        for arm in arms[1:]:
            ratios = stats.paired_ratios(samples["stock"], samples[arm.name], 2)
            name = "ratio" if arm is layer.TUNED else f"ratio_{arm.name}"
            row |= {name: round(stats.median(ratios), 4), f"{name}_ci95": list(stats.confidence(ratios))}
        rows.append(row)
    method = {**layer.METHOD, "interpreted": False, "seconds": 0.25, "arms": [arm.name for arm in arms]}
    return _file("layer", environment, method, rows) | {"bandwidth": BANDWIDTH}


def engine_results(
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    pairs: int = 3,
    kind: str = "engine",
    gain: float = 0.08,
    noise: float = 0.004,
    model: str = "qwen3-30b-a3b",
    together: bool = False,
    **environment: Any,
) -> dict[str, Any]:
    draw = random.Random(f"{gain} {batch_sizes}")
    job = engine.Job(model, batch_sizes, pairs, serve=kind == "serve", together=together)
    rows = []
    for pair, arm in job.order():
        tuned = arm == engine.TUNED
        batches = []
        for size in batch_sizes:
            speed = 210 * size**0.8 * (1 + gain * tuned / size**0.3) * draw.gauss(1, noise)
            tokens = [[prompt] * 64 for prompt in range(size)]
            if tuned and size == 8:
                tokens[5][40] = 1000
            batches.append(
                {
                    "batch_size": size,
                    "tokens_per_s": speed,
                    "ttft_s": 0.012 + 0.001 * size,
                    "tpot_s": size / speed,
                    "samples_s": {"latency": [256 * size / speed] * 5, "ttft": [0.012] * 5},
                    "tokens": tokens,
                    "margins": [[0.025] * 64] * size,
                }
            )
        patch = {"target": "vllm.x:y", "state": "applied", "reason": "", "calls": 9, "tuned": 9, "serves": False}
        tuning = {"name": "low_latency_assignment", "state": "applied", "reason": "", "tuned": 9, "patches": [patch]}
        process = {"version": "0.1.0", "pid": 7, "tunings": [tuning]}
        rows.append(
            {
                "key": {"pair": pair, "arm": arm},
                "status": "ok",
                "startup_s": draw.gauss(61, 1),
                "kv_cache_tokens": 812_000,
                "peak_memory_bytes": 128 * 2**30 + draw.randrange(2**26),
                "batches": batches,
                "plugin": {
                    "verdict": "tuned: low_latency_assignment" if tuned else "stock",
                    "processes": [process] if tuned else [],
                },
            }
        )
    return _file(kind, environment, {**engine.METHOD, **job.settings()}, rows)


def _file(kind: str, environment: dict[str, Any], method: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"format": schema.FORMAT, "kind": kind, "environment": ENVIRONMENT | environment, "method": method, "rows": rows}
