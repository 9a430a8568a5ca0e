"""``bench engine`` around its driver; the driver itself runs in a CPU engine in test_driver.py."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic

from vllm_moe_tune_plugin.bench import engine, schema
from vllm_moe_tune_plugin.bench.schema import BenchError, Results

FAKE_DRIVER = (sys.executable, str(Path(__file__).with_name("fake_driver.py")))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run `bench engine` with the fake driver; returns what it said. The results are in `tmp_path / "results.json"`."""

    def run(
        pairs: int = 2,
        batch_sizes: tuple[int, ...] = (1, 4),
        dp: int = 1,
        together: bool = False,
        engine_args: tuple[str, ...] = (),
        timeout: float = 1800.0,
        **behaviour: object,
    ) -> list[str]:
        monkeypatch.setenv("FAKE_DRIVER_COUNTER", str(tmp_path / "counter"))
        for name, value in behaviour.items():
            monkeypatch.setenv(f"FAKE_DRIVER_{name.upper()}", str(value))
        job = engine.Job(
            "tiny",
            batch_sizes,
            pairs,
            output_len=50,
            greedy_tokens=8,
            dp=dp,
            together=together,
            engine_args=engine_args,
            timeout=timeout,
            driver=FAKE_DRIVER,
            log_dir=tmp_path / "logs",
        )
        said: list[str] = []
        results = Results(tmp_path / "results.json", "engine", synthetic.ENVIRONMENT, {**engine.METHOD, **job.settings()})
        results.resume()
        engine.run(job, results, said.append)
        return said

    return run


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = schema.read(tmp_path / "results.json")["rows"]
    return found


def method(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = schema.read(tmp_path / "results.json")["method"]
    return found


def test_runs_alternate_and_only_the_tuned_ones_are_faster(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    bench(pairs=3, speed=1.25)

    order = [(row["key"]["pair"], row["key"]["arm"]) for row in rows(tmp_path)]
    assert order == [(0, "stock"), (0, "tuned"), (1, "tuned"), (1, "stock"), (2, "stock"), (2, "tuned")]
    for size in (1, 4):
        assert engine.ratios(rows(tmp_path), size) == pytest.approx([1.25] * 3)
        assert engine.agreement(rows(tmp_path), size) == "same"


def test_figures_of_a_run(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    bench(pairs=1)
    run = rows(tmp_path)[0]
    batch = run["batches"][1]

    assert batch["batch_size"] == 4
    assert batch["tokens_per_s"] == pytest.approx(4 * 50 / (4 * 50 / 100))
    assert batch["tpot_s"] == pytest.approx((4 * 50 / 100 - 0.01) / 49)
    assert batch["ttft_s"] == pytest.approx(0.01)
    assert (run["startup_s"], run["kv_cache_tokens"], run["peak_memory_bytes"]) == (30.0, 1000, 2**30)
    assert run["plugin"]["verdict"] == "stock"
    assert rows(tmp_path)[1]["plugin"]["verdict"] == "tuned: low_latency_assignment"


def test_failed_run_ends_it_and_the_next_call_goes_on(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="tuned run failed with status 1: ValueError: the engine did not come up"):
        bench(fails_at=2)
    finished = rows(tmp_path)
    assert [row["key"] for row in finished] == [{"pair": 0, "arm": "stock"}, {"pair": 0, "arm": "tuned"}]
    assert "did not come up" in (tmp_path / "logs" / "run-3-tuned.log").read_text()

    said = bench(fails_at=-1)
    assert rows(tmp_path)[:2] == finished
    assert len(rows(tmp_path)) == 4
    assert "run 1/4 (stock): finished before" in said


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"leaves": ""}, "the plugin was not active in a tuned run"),
        ({"leaves": "stock,tuned"}, "the plugin was active in a stock run"),
        ({"state": "failed"}, r"a tuning failed in a tuned run: low_latency_assignment \(because\)"),
    ],
)
def test_run_that_is_not_what_it_should_be(bench: Callable[..., list[str]], behaviour: dict[str, object], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        bench(**behaviour)


def test_native_stack_has_nothing_to_tune(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    bench(pairs=1, tuned=0, state="native")
    assert rows(tmp_path)[1]["plugin"]["verdict"] == "nothing to tune"


def test_a_tuning_whose_conditions_were_never_met_is_told(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    bench(pairs=1, tuned=0)
    expected = "active, but low_latency_assignment changed none of the calls that it saw"
    assert rows(tmp_path)[1]["plugin"]["verdict"] == expected


def test_tokens_that_part(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    bench(pairs=1, parts_at=3)
    assert engine.agreement(rows(tmp_path), 4) == "part in 1 of 4, first at token 3 (margin 0.500)"


def test_a_step_lasts_as_long_as_its_slowest_rank(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    bench(pairs=1, dp=2, slower=2)
    batch = rows(tmp_path)[0]["batches"][1]
    assert batch["tokens_per_s"] == pytest.approx(2 * 4 * 50 / (4 * 50 / 50))
    assert [answer[0] for answer in batch["tokens"]] == [7] * 4 + [8] * 4  # each rank's own prompts
    assert rows(tmp_path)[1]["plugin"]["verdict"] == "tuned: low_latency_assignment"
    assert len(rows(tmp_path)[1]["plugin"]["processes"]) == 2


def test_ranks_that_differ_are_an_error(bench: Callable[..., list[str]]) -> None:
    with pytest.raises(BenchError, match="the ranks of a tuned run differ: low_latency_assignment is applied and disabled"):
        bench(pairs=1, dp=2, other_state="disabled")


def test_a_rank_that_fails_ends_the_others(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="the stock run failed with status 1: ValueError: a rank did not come up"):
        bench(pairs=1, dp=2, rank_fails=1)
    assert not (tmp_path / "results.json").exists()


def test_two_engines_take_turns(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    """One start of each arm for all pairs; the arms alternate at each batch size."""
    said = bench(pairs=2, together=True, speed=1.25)

    found = rows(tmp_path)
    order = ((0, "stock"), (0, "tuned")), ((1, "tuned"), (1, "stock"))
    assert [(row["key"]["pair"], row["key"]["arm"]) for row in found] == [run for pair in order for run in pair]
    assert [row["startup_s"] for row in found] == [30.0, 31.0, None, None]
    for size in (1, 4):
        assert engine.ratios(found, size) == pytest.approx([1.25] * 2)
        assert engine.agreement(found, size) == "same"
    verdicts = {"stock": "stock", "tuned": "tuned: low_latency_assignment"}
    assert [row["plugin"]["verdict"] for row in found] == [verdicts[row["key"]["arm"]] for row in found]
    turns = [line.partition(":")[0] + line.rpartition(" at")[2] for line in said if "tok/s" in line]
    assert turns == [f"pair {pair + 1}/2 ({arm}) {size}" for own in order for size in (1, 4) for pair, arm in own]
    logs = [log.read_text() for log in (tmp_path / "logs").iterdir()]
    assert [f"--gpu-memory-utilization {engine.SHARE}" in log for log in logs] == [True, True]
    assert method(tmp_path)["gpu_memory_utilization"] == engine.SHARE
    assert method(tmp_path)["order"].startswith("a pair's two runs alternate at each batch size")


@pytest.mark.parametrize("words", [("--gpu-memory-utilization", "0.3"), ("--gpu_memory_utilization=0.3",)])
def test_who_says_how_much_memory_each_engine_gets_is_heard(
    bench: Callable[..., list[str]], tmp_path: Path, words: tuple[str, ...]
) -> None:
    bench(pairs=1, together=True, engine_args=words)
    logs = [log.read_text() for log in (tmp_path / "logs").iterdir()]
    assert [log.splitlines()[0].endswith(f" dummy {' '.join(words)}") for log in logs] == [True, True]
    assert "gpu_memory_utilization" not in method(tmp_path)  # it is in engine_args


@pytest.mark.parametrize("words", [("--kv-cache-memory-bytes", "4294967296"), ("--kv_cache_memory_bytes=1",)])
def test_engines_that_measure_no_memory_start_at_once(
    bench: Callable[..., list[str]], tmp_path: Path, words: tuple[str, ...]
) -> None:
    bench(pairs=1, together=True, engine_args=words, meets=30)
    assert [row["key"]["arm"] for row in rows(tmp_path)] == ["stock", "tuned"]


def test_engines_that_measure_memory_start_one_after_the_other(bench: Callable[..., list[str]]) -> None:
    with pytest.raises(BenchError, match="ValueError: the other engine did not start meanwhile"):
        bench(pairs=1, together=True, meets=1)


def test_pairs_that_are_there_need_no_engine(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    bench(pairs=1, together=True)
    assert bench(pairs=1, together=True) == []
    bench(pairs=3, together=True)
    assert [row["startup_s"] for row in rows(tmp_path)] == [30.0, 31.0, 33.0, 32.0, None, None]


def test_a_pair_that_was_cut_in_half_is_run_anew(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    bench(pairs=2, together=True)
    path = tmp_path / "results.json"
    data = schema.read(path)
    data["rows"].pop()
    path.write_text(schema.dump(data))
    bench(pairs=2, together=True)
    order = [(row["key"]["pair"], row["key"]["arm"]) for row in rows(tmp_path)]
    assert order == [(0, "stock"), (0, "tuned"), (1, "tuned"), (1, "stock")]
    assert rows(tmp_path)[:2] == data["rows"][:2]


def test_one_of_two_engines_that_fails_ends_the_other(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="the tuned run failed with status 1: ValueError: the engine did not come up"):
        bench(together=True, fails_at=1)
    with pytest.raises(BenchError, match="a tuning failed in a tuned run"):
        bench(together=True, fails_at=-1, state="failed")
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("together", [False, True])
def test_a_run_that_takes_too_long_as_a_whole(bench: Callable[..., list[str]], tmp_path: Path, together: bool) -> None:
    """Though none of its batches does."""
    with pytest.raises(BenchError, match="the stock run was not finished after 3 s"):
        bench(batch_sizes=tuple(range(1, 9)), timeout=3, seconds=0.6, together=together)
    assert not (tmp_path / "results.json").exists()


def test_results_of_another_environment_are_left_alone(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    bench(pairs=1)
    before = (tmp_path / "results.json").read_text()
    with pytest.raises(BenchError, match=r"another method \(batch_sizes: \[1, 4\], here \[2\]\)"):
        bench(pairs=1, batch_sizes=(2,))
    assert (tmp_path / "results.json").read_text() == before


def test_nothing_runs_on_when_the_benchmark_is_told_to_end(tmp_path: Path) -> None:
    """As a job scheduler or `timeout` does it. The engine's own children count as well."""
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pids')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    program = (
        "import pathlib, sys\n"
        "from vllm_moe_tune_plugin.bench import engine\n"
        f"with engine._process([sys.executable, {str(driver)!r}], {{}}, pathlib.Path({str(tmp_path / 'log')!r})) as process:\n"
        "    process.wait()\n"
    )
    bench = subprocess.Popen([sys.executable, "-c", program])
    pids = tmp_path / "pids"
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    bench.terminate()
    assert bench.wait(timeout=60) != 0
    for pid in pids.read_text().split():
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_environment_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "_names_in_vllm_envs", lambda: '"VLLM_HOST_IP": ..., "VLLM_USE_AOT_COMPILE": ...')
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    for name in ("VLLM_HOST_IP", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    stock, tuned = (engine._environment(arm, tmp_path) for arm in ("stock", "tuned"))

    assert stock["VLLM_USE_AOT_COMPILE"] == "1"  # the user's
    assert (stock["VLLM_HOST_IP"], stock["HF_HUB_OFFLINE"]) == ("127.0.0.1", "1")
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in stock  # a release that does not know it would warn
    assert {name for name in stock if stock[name] != tuned[name]} == {"VLLM_PLUGINS"}
    assert (stock["VLLM_PLUGINS"], tuned["VLLM_PLUGINS"]) == ("", "moe_tune")
