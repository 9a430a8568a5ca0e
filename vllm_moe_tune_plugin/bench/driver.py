"""One engine and all that is measured in it: ``python -m vllm_moe_tune_plugin.bench.driver REQUEST EVENTS``.

vLLM's own latency benchmark runs once for each batch size. It would start an engine each time, so ``vllm.LLM`` is replaced
by a stand-in that makes one engine and gives it again. ``VLLM_PLUGINS`` decides whether the engine is tuned; this process
knows nothing of it. What to do comes line by line on the standard input: ``start``, ``latency N`` or ``greedy N`` for N
prompts. What was done is one JSON line in the file EVENTS. The engine stays until the standard input is closed: those of
other data-parallel ranks may need it.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

POLL_S = 0.25


class OneEngine:
    """Stands for ``vllm.LLM``: the first call starts the engine, every other one gives it again."""

    def __init__(self, llm_class: Any, started: Callable[[Any, float], None]) -> None:
        self._class = llm_class
        self._started = started
        self.engine: Any = None

    def _once(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.engine is None:
            start = time.perf_counter()
            self.engine = make(*args, **kwargs)
            self._started(self.engine, time.perf_counter() - start)
        return self.engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._once(self._class, *args, **kwargs)

    def from_engine_args(self, engine_args: Any) -> Any:
        return self._once(self._class.from_engine_args, engine_args)


class PeakMemory(threading.Thread):
    """The largest use of GPU memory seen, by all processes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0

    def run(self) -> None:
        from vllm_moe_tune_plugin.bench.schema import memory_in_use

        while True:
            self.bytes = max(self.bytes, memory_in_use())
            time.sleep(POLL_S)


def fixed_prompts(batch_size: int, length: int, seed: int) -> list[list[int]]:
    """The same token ids in every run; below 10000, as vLLM's benchmark draws them."""
    draw = random.Random(f"{seed} {batch_size} {length}")
    return [[draw.randrange(10, 10000) for _ in range(length)] for _ in range(batch_size)]


def greedy(engine: Any, batch_size: int, request: dict[str, Any]) -> dict[str, Any]:
    """The greedy tokens of fixed prompts, and by how much each token was ahead of the next (in log-probability)."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=request["greedy_tokens"], ignore_eos=True, detokenize=False, logprobs=2)
    prompts = [{"prompt_token_ids": ids} for ids in fixed_prompts(batch_size, request["input_len"], request["seed"])]
    answers = [answer.outputs[0] for answer in engine.generate(prompts, params, use_tqdm=False)]
    margins = []
    for answer in answers:
        ranked = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in answer.logprobs]
        margins.append([float(f"{step[0] - step[1]:.3g}") for step in ranked])
    return {"tokens": [list(answer.token_ids) for answer in answers], "margins": margins}


def main(request_file: str, events_file: str) -> None:
    import numpy
    import vllm
    from vllm.benchmarks import latency
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    request = json.loads(pathlib.Path(request_file).read_text())
    memory = PeakMemory()
    memory.start()

    def tell(event: str, **what: Any) -> None:
        with pathlib.Path(events_file).open("a") as events:
            events.write(json.dumps({"event": event, **what}) + "\n")

    def started(engine: Any, seconds: float) -> None:
        cache = getattr(getattr(engine.llm_engine, "vllm_config", None), "cache_config", None)
        blocks, size = getattr(cache, "num_gpu_blocks", None), getattr(cache, "block_size", None)
        tell("started", seconds=seconds, kv_cache_tokens=blocks * size if blocks and size else None)

    engine = OneEngine(vllm.LLM, started)
    vllm.LLM = engine
    parser = FlexibleArgumentParser()
    latency.add_cli_args(parser)

    def seconds(batch_size: int, output_len: int, warmup: int, iterations: int) -> Sequence[float]:
        # The benchmark draws its prompts here. They decide how many experts a batch needs, by more than a tuning gains.
        numpy.random.seed(request["seed"] + batch_size)
        with tempfile.TemporaryDirectory(prefix="moe-tune-") as folder:
            result = os.path.join(folder, "latency.json")
            arguments = {
                "--model": request["model"],
                "--batch-size": batch_size,
                "--input-len": request["input_len"],
                "--output-len": output_len,
                "--num-iters-warmup": warmup,
                "--num-iters": iterations,
                "--output-json": result,
            }
            words = [str(word) for pair in arguments.items() for word in pair]
            latency.main(parser.parse_args([*words, "--disable-detokenize", *request["engine_args"]]))
            latencies: list[float] = json.loads(pathlib.Path(result).read_text())["latencies"]
            return latencies

    warm: set[str] = set()
    for line in sys.stdin:
        match line.split():
            case ["start"]:
                seconds(1, 1, 0, 1)
            case ["latency", size]:
                # Triton compiles kernels at the first batch of a size, which engines warn about and take seconds for.
                warmup = 0 if size in warm else request["warmup"]
                warm.add(size)
                first, whole = (
                    seconds(int(size), output_len, warmup, request["iterations"]) for output_len in (1, request["output_len"])
                )
                tell("latency", batch_size=int(size), latencies_s=whole, ttft_s=first, peak_memory_bytes=memory.bytes)
            case ["greedy", size]:
                tell("greedy", batch_size=int(size), **greedy(engine.engine, int(size), request))


if __name__ == "__main__":
    main(*sys.argv[1:])
