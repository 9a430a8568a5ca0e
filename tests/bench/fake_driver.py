"""Stands for the driver where it would need a GPU: tells what an engine would, and leaves the plugin's states.

How it behaves is in the environment: FAKE_DRIVER_SPEED (tuned over stock), FAKE_DRIVER_TUNED (calls that a patch changed),
FAKE_DRIVER_STATE (the tuning's state), FAKE_DRIVER_LEAVES (arms that leave states), FAKE_DRIVER_FAILS_AT (number of the run),
FAKE_DRIVER_SECONDS (for the batches of a size), FAKE_DRIVER_MEETS (seconds in which the other arm's engine must start, too).
Of data-parallel ranks the second takes FAKE_DRIVER_SLOWER times as long, its tuning has FAKE_DRIVER_OTHER_STATE, and it fails
where FAKE_DRIVER_RANK_FAILS is set.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(request_file: str, events_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    print("engine arguments:", *request["engine_args"])
    tuned = os.environ["VLLM_PLUGINS"] == "moe_tune"
    rank = int(os.environ.get("VLLM_DP_RANK", "0"))
    counter = Path(os.environ["FAKE_DRIVER_COUNTER"])
    run = int(counter.read_text() or 0) if counter.exists() else 0
    if rank == 0:
        counter.write_text(str(run + 1))
    if str(run) == os.environ.get("FAKE_DRIVER_FAILS_AT"):
        print("ValueError: the engine did not come up")
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(1)
    if rank and os.environ.get("FAKE_DRIVER_RANK_FAILS"):
        print("ValueError: a rank did not come up")
        sys.exit(1)

    speed = float(os.environ.get("FAKE_DRIVER_SPEED", "1")) if tuned else 1.0
    if rank:
        speed /= float(os.environ.get("FAKE_DRIVER_SLOWER", "1"))
    with Path(events_file).open("a") as events:

        def tell(**event: object) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        for line in sys.stdin:
            match line.split():
                case ["start"]:
                    if "FAKE_DRIVER_MEETS" in os.environ:
                        meet(counter, tuned, float(os.environ["FAKE_DRIVER_MEETS"]))
                    leave(tuned, rank)
                    tell(event="started", seconds=30.0 + run, kv_cache_tokens=1000)
                case ["latency", words]:
                    time.sleep(float(os.environ.get("FAKE_DRIVER_SECONDS", "0")))
                    size = int(words)
                    latency = [size * request["output_len"] / (100 * speed) + wobble for wobble in (-0.001, 0.0, 0.001)]
                    first = [0.01, 0.01, 0.01]
                    tell(event="latency", batch_size=size, latencies_s=latency, ttft_s=first, peak_memory_bytes=2**30)
                case ["greedy", words]:
                    size = int(words)
                    tokens = [[7 + request["seed"]] * request["greedy_tokens"] for _ in range(size)]
                    if tuned and os.environ.get("FAKE_DRIVER_PARTS_AT"):
                        tokens[-1][int(os.environ["FAKE_DRIVER_PARTS_AT"])] = 8
                    tell(event="greedy", batch_size=size, tokens=tokens, margins=[[0.5] * request["greedy_tokens"]] * size)
    leave(tuned, rank)


def meet(counter: Path, tuned: bool, seconds: float) -> None:
    """Wait for the other arm's engine to start."""
    own, other = (counter.with_suffix(f".{arm}") for arm in (tuned, not tuned))
    own.touch()
    deadline = time.monotonic() + seconds
    while not other.exists():
        if time.monotonic() > deadline:
            print("ValueError: the other engine did not start meanwhile")
            sys.exit(1)
        time.sleep(0.01)


def leave(tuned: bool, rank: int) -> None:
    """The states of a worker, as the plugin leaves them once the engine is up and again at the end."""
    if ("tuned" if tuned else "stock") in os.environ.get("FAKE_DRIVER_LEAVES", "tuned").split(","):
        folder = Path(os.environ["MOE_TUNE_STATUS_DIR"])
        folder.mkdir(parents=True, exist_ok=True)
        changed = int(os.environ.get("FAKE_DRIVER_TUNED", "5"))
        patch = {"target": "vllm.x:y", "state": "applied", "reason": "", "calls": 9, "tuned": changed, "serves": False}
        state = os.environ.get("FAKE_DRIVER_OTHER_STATE" if rank else "FAKE_DRIVER_STATE", "applied")
        tuning = {"name": "low_latency_assignment", "state": state, "reason": "because", "tuned": changed, "patches": [patch]}
        (folder / f"moe-tune-{rank}.json").write_text(json.dumps({"version": "0", "pid": 1, "tunings": [tuning]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
