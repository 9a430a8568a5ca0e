"""`bench engine` around vLLM's own CPU engine: the real driver, vLLM's own benchmark, and the plugin that vLLM loads.

As in the tests of engines, the experts are the real ones in Triton's interpreter, so that a tuned run can prove that it was
tuned. How fast they are says nothing.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cpu_engine import RELEASE, environment, needs_engine

from vllm_moe_tune_plugin.bench import driver, engine, schema

COMMAND = "from vllm_moe_tune_plugin.bench.cli import bench; bench(prog_name='bench')"
SIZES, GREEDY = (1, 2), 4


def test_prompts_are_the_same_in_every_run_and_differ_by_batch() -> None:
    prompts = driver.fixed_prompts(4, 16, seed=0)
    assert prompts == driver.fixed_prompts(4, 16, seed=0)
    assert len({tuple(ids) for ids in prompts + driver.fixed_prompts(2, 16, seed=0)}) == 6
    assert all(10 <= token < 10000 for ids in prompts for token in ids)


def test_one_engine_is_made_and_given_again() -> None:
    class Engine:
        made = 0

        def __init__(self, **_: Any) -> None:
            Engine.made += 1

        @classmethod
        def from_engine_args(cls, _: Any) -> Any:
            return cls()

    times: list[float] = []
    one = driver.OneEngine(Engine, lambda _, seconds: times.append(seconds))
    first = one(model="a")
    assert one(model="b") is first
    assert one.from_engine_args(object()) is first
    assert (Engine.made, len(times)) == (1, 1)
    assert one.engine is first


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("engine")
    # The decode kernel has nothing for a float32 model, which a bench rightly takes for a failure.
    environ = environment(folder, folder / "cache") | {"MOE_TUNE_DISABLE": "decode_kernel"}
    path = folder / "results.json"
    lengths = ["--input-len", "4", "--output-len", "3", "--greedy-tokens", str(GREEDY), "--iterations", "2", "--warmup", "0"]
    command = [sys.executable, "-c", COMMAND, "engine", "tiny", "--pairs", "1", "-o", str(path), *lengths]
    command += ["--batch", ",".join(map(str, SIZES)), "--logs", str(folder / "logs")]
    command += ["--", "--enforce-eager", "--max-model-len", "32", "--dtype", "float32", "--moe-backend", "triton"]
    command += ["--max-num-seqs", "8", "--max-num-batched-tokens", "32"]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500)
    logs = "".join(log.read_text()[-3000:] for log in (folder / "logs").glob("*")) if done.returncode else ""
    assert done.returncode == 0, done.stdout + logs
    return path, done.stdout


@needs_engine
def test_stock_and_tuned_runs_of_a_real_engine(measured: tuple[Path, str]) -> None:
    path, said = measured
    rows = schema.read(path)["rows"]
    assert [(row["key"]["pair"], row["key"]["arm"]) for row in rows] == [(0, "stock"), (0, "tuned")]
    for row in rows:
        assert row["startup_s"] > 0
        assert [batch["batch_size"] for batch in row["batches"]] == list(SIZES)
        for batch in row["batches"]:
            assert len(batch["samples_s"]["latency"]) == len(batch["samples_s"]["ttft"]) == 2
            assert batch["tokens_per_s"] > 0
            assert [len(tokens) for tokens in batch["tokens"]] == [GREEDY] * batch["batch_size"]
            assert all(margin >= 0 for margins in batch["margins"] for margin in margins)
    for size in SIZES:
        assert len(engine.ratios(rows, size)) == 1
        assert engine.agreement(rows, size) == "same"
    assert "greedy tokens" in said


@needs_engine
def test_each_run_proves_its_arm(measured: tuple[Path, str]) -> None:
    """By the counters that the engine's worker left: the low-latency assignment is upstream's from 0.20, its count is kept."""
    native = RELEASE is not None and RELEASE >= (0, 20)
    acted = "kept_count" if native else "low_latency_assignment"
    for row in schema.read(measured[0])["rows"]:
        proof = row["plugin"]
        if row["key"]["arm"] == "stock":
            assert proof == {"verdict": "stock", "processes": []}
            continue
        assert proof["verdict"] == f"tuned: {acted}"
        tunings = [tuning for process in proof["processes"] for tuning in process["tunings"]]
        states = {tuning["state"] for tuning in tunings if tuning["name"] == "low_latency_assignment"}
        assert ("native" if native else "applied") in states
        changed = {tuning["name"] for tuning in tunings if tuning["tuned"]}
        assert changed == {acted}
