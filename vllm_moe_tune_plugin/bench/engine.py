"""``bench engine``: vLLM's own benchmarks, stock and tuned in turn.

Runs go A B B A A B ..., so that each pair of neighbours is one stock and one tuned run and a slow drift of the machine falls
on both. Each run has an engine of its own; or all share one of each arm, both on the same GPUs (``together``): then a pair's
runs alternate at each batch size, seconds apart, and no run waits for a start. Only ``VLLM_PLUGINS`` differs between them.
A run counts when the states that the engine's own processes leave (``MOE_TUNE_STATUS_DIR``) show that it was what it should
be: a tuned one tuned, a stock one without the plugin.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_moe_tune_plugin.bench import models, stats
from vllm_moe_tune_plugin.bench.schema import BenchError, Results, memory_in_use

STOCK, TUNED = "stock", "tuned"
ARMS = (STOCK, TUNED)
PLUGINS = {STOCK: "", TUNED: "moe_tune"}
DRIVER = (sys.executable, "-m", "vllm_moe_tune_plugin.bench.driver")
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
POLL_S = 0.05
#: Of the GPU's memory for each of two engines that share it.
SHARE = 0.47

#: What an engine on a machine without a network needs, where the user has not said otherwise.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # Both only cost start-up time: saving the compiled artifact, and building FlashInfer's sampler with nvcc.
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}

METHOD = {
    "what": "vllm bench latency in one engine for all batch sizes, with the same prompts in every run; "
    "serve: vllm serve with vllm bench serve",
    "order": "A B B A ...; a pair is two neighbouring runs",
    "tokens_per_s": "batch size * output length / median latency of a run",
    "ttft_s": "median latency with one output token; tpot_s: (median latency - ttft_s) / (output length - 1)",
    "ratio": "tuned over stock tokens a second (stock over tuned time), above 1: tuned is faster; one for each pair",
    "peak_memory_bytes": "largest use of the GPUs' memory by all processes; vLLM fills its share with KV cache, "
    "so kv_cache_tokens tells what was left for it",
    "tokens": "greedy tokens of fixed prompts; margins: how far a token's log-probability was ahead of the next",
}
#: What is otherwise where two engines share the GPUs.
TOGETHER = {
    "order": "a pair's two runs alternate at each batch size: A B in one pair, B A in the next",
    "together": "one engine of each arm is up for all pairs, stock's the first to start, or both at once where engine_args say "
    "how large the KV cache is; startup_s and peak_memory_bytes, in which both engines are, do not tell the arms apart",
}


@dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        pairs: of one stock and one tuned run.
        timeout: seconds for one run.
        dp: data-parallel ranks, each an engine with prompts of its own and batches of ``batch_sizes``.
        together: one stock and one tuned engine share the GPUs for all pairs.
    """

    model: str
    batch_sizes: Sequence[int]
    pairs: int = 3
    input_len: int = 32
    output_len: int = 256
    iterations: int = 5
    warmup: int = 2
    greedy_tokens: int = 64
    timeout: float = 1800.0
    dp: int = 1
    together: bool = False
    serve: bool = False
    requests_per_slot: int = 8
    engine_args: Sequence[str] = ()
    driver: Sequence[str] = field(default=DRIVER, compare=False)
    log_dir: pathlib.Path | None = field(default=None, compare=False)

    def settings(self) -> dict[str, Any]:
        """What the figures depend on, for the file of results."""
        names = ("input_len", "output_len", "iterations", "warmup", "greedy_tokens", "batch_sizes", "engine_args")
        settings = {name: getattr(self, name) for name in names}
        settings = {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in settings.items()}
        if self.serve:
            settings["requests_per_slot"] = self.requests_per_slot
        if self.dp > 1:
            settings["dp"] = self.dp
        if self.together:
            settings |= TOGETHER
        if self.share is not None:
            settings["gpu_memory_utilization"] = self.share
        return {"model": self.model, **settings}

    @property
    def share(self) -> float | None:
        """Of the GPU's memory for each of two engines, where ``engine_args`` do not say it."""
        return SHARE if self.together and not self._says("--gpu-memory-utilization") else None

    @property
    def starts_at_once(self) -> bool:
        """Whether engines may start side by side: one that measures how much memory is left must be alone."""
        return self._says("--kv-cache-memory-bytes")

    def _says(self, option: str) -> bool:
        return any(word.replace("_", "-").startswith(option) for word in self.engine_args)

    def order_of(self, pair: int) -> tuple[str, ...]:
        """A B, B A, A B and so on: a slow drift of the machine falls on both."""
        return ARMS if pair % 2 == 0 else ARMS[::-1]

    def order(self) -> list[tuple[int, str]]:
        """(pair, arm) of each run."""
        return [(pair, arm) for pair in range(self.pairs) for arm in self.order_of(pair)]


def run(job: Job, results: Results, say: Callable[[str], None]) -> None:
    """Do the runs that ``results`` lacks; each is saved when it is finished.

    Raises:
        BenchError: a run failed, or was not what it should be. The runs until then are saved.
    """
    with tempfile.TemporaryDirectory(prefix="moe-tune-bench-") as folder:
        model, arguments = _model(job, pathlib.Path(folder))
        if job.together:
            _together(job, model, arguments, pathlib.Path(folder), results, say)
            return
        for number, (pair, arm) in enumerate(job.order()):
            key = {"pair": pair, "arm": arm}
            name = f"run {number + 1}/{2 * job.pairs} ({arm})"
            if results.has(key):
                say(f"{name}: finished before")
                continue
            place = pathlib.Path(folder) / f"run-{number}"
            try:
                row = (_serve if job.serve else _latency)(job, model, arguments, arm, place, functools.partial(_say, say, name))
            finally:
                _keep_log(job, place / "log.txt", number, arm)
            results.add({"key": key, "status": "ok", **row})
            say(f"{name}: {describe(row)}")


def _say(say: Callable[[str], None], name: str, text: str) -> None:
    say(f"{name}: {text}")


def describe(row: Mapping[str, Any]) -> str:
    """One line about a finished run."""
    speeds = ", ".join(f"{batch['tokens_per_s']:.1f} tok/s at {batch['batch_size']}" for batch in row["batches"])
    return f"{speeds}; start {row['startup_s']:.0f} s; {row['plugin']['verdict']}"


def _model(job: Job, folder: pathlib.Path) -> tuple[pathlib.Path | str, list[str]]:
    """The model's folder and the engine arguments that it needs."""
    arguments = list(job.engine_args)
    if job.model in models.MODELS:
        model = models.make(job.model, folder)
        arguments = ["--load-format", "dummy", *arguments]
        if job.serve:
            models.add_tokenizer(model)
        else:
            arguments = ["--skip-tokenizer-init", *arguments]
        return model, arguments
    path = pathlib.Path(job.model)
    if not path.is_dir():
        # Not a folder: a name that vLLM resolves in its cache.
        return job.model, arguments
    tokenizers = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json")
    if not any((path / name).exists() for name in tokenizers):
        if job.serve:
            copy = folder / path.name
            copy.mkdir()
            for entry in path.iterdir():
                (copy / entry.name).symlink_to(entry.resolve())
            models.add_tokenizer(copy)
            return copy, arguments
        arguments = ["--skip-tokenizer-init", *arguments]
    return path, arguments


def _environment(arm: str, status: pathlib.Path) -> dict[str, str]:
    known = _names_in_vllm_envs()
    unset = {
        name: value
        for name, value in OFFLINE.items()
        if name not in os.environ and (name in known or not name.startswith("VLLM_"))
    }
    return {**unset, **os.environ, "VLLM_PLUGINS": PLUGINS[arm], "MOE_TUNE_STATUS_DIR": str(status)}


def _names_in_vllm_envs() -> str:
    """The text of vLLM's table of variables: it warns about those that it does not know."""
    spec = importlib.util.find_spec("vllm")
    table = pathlib.Path(spec.origin).with_name("envs.py") if spec is not None and spec.origin is not None else None
    return table.read_text() if table is not None and table.exists() else ""


def _keep_log(job: Job, log: pathlib.Path, number: int, arm: str) -> None:
    if job.log_dir is not None and log.exists():
        job.log_dir.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, job.log_dir / f"run-{number + 1}-{arm}.log")


# ---- processes


@contextlib.contextmanager
def _process(command: Sequence[str], environ: Mapping[str, str], log: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, of which nothing runs afterwards: the next engine needs its memory.

    That also holds where this process is asked to end: SIGTERM interrupts it here as Ctrl-C does.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            for number, grace in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
                deadline = time.monotonic() + grace
                if _runs(process):
                    os.killpg(process.pid, number)
                while _runs(process) and time.monotonic() < deadline:
                    time.sleep(0.1)
            process.wait()
            signal.signal(signal.SIGTERM, before)


def _runs(process: subprocess.Popen[bytes]) -> bool:
    """Whether anything of a process's group still runs. Zombies do not: a container may have nobody who reaps orphans."""
    process.poll()
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == process.pid and state not in "ZX":
                return True
    return False


def _failure(what: str, log: pathlib.Path) -> BenchError:
    """The error with the line of the log that tells most: the last error that does not only point at another one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    errors = [line for line in lines if re.search(r"\w(Error|Exception): ", line) and "See root cause above" not in line]
    telling = (errors or lines or ["no output"])[-1]
    return BenchError(f"{what}: {telling[-300:]}")


# ---- vllm bench latency


class Engine:
    """One engine (with data parallelism one for each rank), with its driver that does what it is told.

    A context: nothing of it runs afterwards.
    """

    def __init__(self, job: Job, model: pathlib.Path | str, arguments: Sequence[str], arm: str, place: pathlib.Path) -> None:
        self.arm = arm
        self.log = place / "log.txt"
        self.status = place / "status"
        self._job = job
        self._commands: list[tuple[Sequence[str], Mapping[str, str]]] = []
        self._told: list[Told] = []
        self._left = job.timeout
        self._asked = 0.0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks = contextlib.ExitStack()
        place.mkdir()
        environ, port = _environment(arm, self.status), _free_port()
        for rank in range(job.dp):
            request, events = place / f"request-{rank}.json", place / f"events-{rank}.jsonl"
            wanted = {
                "model": str(model),
                "engine_args": list(arguments),
                "input_len": job.input_len,
                "output_len": job.output_len,
                "iterations": job.iterations,
                "warmup": job.warmup,
                "greedy_tokens": job.greedy_tokens,
                "seed": rank,
            }
            request.write_text(json.dumps(wanted))
            own = {**environ, **_data_parallel(rank, job.dp, port)} if job.dp > 1 else environ
            self._commands.append(([*job.driver, str(request), str(events)], own))
            self._told.append(Told(events))

    def __enter__(self) -> Engine:
        for command, environ in self._commands:
            self._processes.append(self._ranks.enter_context(_process(command, environ, self.log)))
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.close()

    def begin_run(self) -> None:
        """From here on the time of another run counts."""
        self._left = self._job.timeout

    def do(self, words: str) -> list[dict[str, Any]]:
        """Let every rank do one thing; returns what each one told of it.

        Raises:
            BenchError: a rank failed, or the run took too long.
        """
        self.ask(words)
        return self.answers()

    def ask(self, words: str) -> None:
        """Let every rank do one thing, without waiting for it."""
        self._asked = time.monotonic()
        for process in self._processes:
            # One that has ended breaks the pipe; why it ended is found below.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{words}\n".encode())  # type: ignore[union-attr]  # it is a pipe
                process.stdin.flush()  # type: ignore[union-attr]

    def answers(self) -> list[dict[str, Any]]:
        """What each rank told of what it was asked for, once all have."""
        events: list[dict[str, Any]] = []
        for told in self._told:
            while (event := told.next()) is None:
                ended = [status for process in self._processes if (status := process.poll()) is not None]
                if ended:
                    raise _failure(f"the {self.arm} run failed with status {max(ended, key=abs)}", self.log)
                if time.monotonic() > self._asked + self._left:
                    raise _failure(f"the {self.arm} run was not finished after {self._job.timeout:.0f} s", self.log)
                time.sleep(POLL_S)
            events.append(event)
        self._left -= time.monotonic() - self._asked
        return events

    def end(self) -> None:
        """Let every rank end by itself, so that its processes leave their last counts."""
        for process in self._processes:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self._processes:
            try:
                status = process.wait(timeout=max(self._left, 1.0))
            except subprocess.TimeoutExpired:
                raise _failure(f"the {self.arm} run did not end", self.log) from None
            if status:
                raise _failure(f"the {self.arm} run failed with status {status}", self.log)


def _latency(
    job: Job, model: pathlib.Path | str, arguments: Sequence[str], arm: str, place: pathlib.Path, say: Callable[[str], None]
) -> dict[str, Any]:
    with Engine(job, model, arguments, arm, place) as engine:
        run = Run(job, engine.do("start"))
        say(f"engine up after {run.startup_s:.0f} s")
        _take_turns(job, [(engine, run, say)])
        engine.end()
        return run.row(_plugin(engine.status, arm))


def _take_turns(job: Job, runs: Sequence[tuple[Engine, Run, Callable[[str], None]]]) -> None:
    """All batches of the given runs, one run after the other at each batch size."""
    for size in job.batch_sizes:
        for engine, run, say in runs:
            run.add(engine.do(f"latency {size}"))
            say(run.last())
    for size in job.batch_sizes if job.greedy_tokens else ():
        for engine, run, _ in runs:
            run.add(engine.do(f"greedy {size}"))


def _together(
    job: Job,
    model: pathlib.Path | str,
    arguments: Sequence[str],
    folder: pathlib.Path,
    results: Results,
    say: Callable[[str], None],
) -> None:
    """The pairs that ``results`` lacks, in two engines that share the GPUs and take turns."""
    missing = [pair for pair in range(job.pairs) if not all(results.has({"pair": pair, "arm": arm}) for arm in ARMS)]
    if not missing:
        return
    # Half a pair, left where this was stopped, is run anew: its other half would be hours away.
    results.rows[:] = [row for row in results.rows if row["key"]["pair"] not in missing]
    if job.share is not None:
        arguments = [*arguments, "--gpu-memory-utilization", str(job.share)]
    with contextlib.ExitStack() as stack:
        engines: dict[str, Engine] = {}
        started: dict[str, list[dict[str, Any]]] = {}
        for arms in [ARMS] if job.starts_at_once else [[arm] for arm in ARMS]:
            for arm in arms:
                engines[arm] = engine = stack.enter_context(Engine(job, model, arguments, arm, folder / arm))
                stack.callback(_keep_log, job, engine.log, ARMS.index(arm), arm)
                engine.ask("start")
            for arm in arms:
                started[arm] = engines[arm].answers()
                say(f"{arm} engine up after {_startup_s(started[arm]):.0f} s")
        for pair in missing:
            runs = {arm: Run(job, started[arm], first=pair == missing[0]) for arm in job.order_of(pair)}
            if pair != missing[0]:
                for engine in engines.values():
                    engine.begin_run()
            names = {arm: f"pair {pair + 1}/{job.pairs} ({arm})" for arm in runs}
            _take_turns(job, [(engines[arm], run, functools.partial(_say, say, names[arm])) for arm, run in runs.items()])
            # What the processes left when their engine was up: enough, should this be stopped before it ends.
            proofs = {arm: _plugin(engines[arm].status, arm) for arm in runs}
            for arm, run in runs.items():
                results.add({"key": {"pair": pair, "arm": arm}, "status": "ok", **run.row(proofs[arm])})
        for engine in engines.values():
            engine.end()
    for row in results.rows:
        if row["key"]["pair"] in missing:
            row["plugin"] = _plugin(engines[row["key"]["arm"]].status, row["key"]["arm"])
    results.save()


def _data_parallel(rank: int, size: int, port: int) -> dict[str, str]:
    """What tells an engine that it is one of several ranks on this host."""
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(size),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }


class Told:
    """The events that a driver writes to a file, one after the other."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._read = 0

    def next(self) -> dict[str, Any] | None:
        """The first that was not read yet, if it is there."""
        if not self._path.exists():
            return None
        with self._path.open("rb") as events:
            events.seek(self._read)
            line = events.readline()
        if not line.endswith(b"\n"):  # it may still be written
            return None
        self._read += len(line)
        event: dict[str, Any] = json.loads(line)
        return event


class Run:
    """What the drivers of all ranks tell of one run. A step is over when the slowest rank has made it."""

    def __init__(self, job: Job, started: Sequence[Mapping[str, Any]], first: bool = True) -> None:
        self.startup_s = _startup_s(started) if first else None
        self._job = job
        self._kv_cache_tokens = started[0]["kv_cache_tokens"]
        self._batches: list[dict[str, Any]] = []
        self._peak = 0

    def add(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        size = ranks[0]["batch_size"]
        if ranks[0]["event"] == "greedy":
            batch = next(batch for batch in self._batches if batch["batch_size"] == size)
            batch |= {name: [answer for rank in ranks for answer in rank[name]] for name in ("tokens", "margins")}
            return
        latencies, firsts = (
            [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)] for name in ("latencies_s", "ttft_s")
        )
        latency, ttft = stats.median(latencies), stats.median(firsts)
        self._peak = max(self._peak, *(rank["peak_memory_bytes"] for rank in ranks))
        self._batches.append(
            {
                "batch_size": size,
                "tokens_per_s": self._job.dp * size * self._job.output_len / latency,
                "ttft_s": ttft,
                "tpot_s": (latency - ttft) / max(self._job.output_len - 1, 1),
                "samples_s": {"latency": latencies, "ttft": firsts},
            }
        )

    def last(self) -> str:
        batch = self._batches[-1]
        return f"{batch['tokens_per_s']:.1f} tok/s at {batch['batch_size']}"

    def row(self, plugin: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "startup_s": self.startup_s,
            "kv_cache_tokens": self._kv_cache_tokens,
            "peak_memory_bytes": self._peak,
            "batches": self._batches,
            "plugin": plugin,
        }


def _startup_s(started: Sequence[Mapping[str, Any]]) -> float:
    return max(float(event["seconds"]) for event in started)


# ---- vllm serve, vllm bench serve


def _serve(
    job: Job, model: pathlib.Path | str, arguments: Sequence[str], arm: str, place: pathlib.Path, say: Callable[[str], None]
) -> dict[str, Any]:
    place.mkdir()
    log, environ = place / "log.txt", _environment(arm, place / "status")
    port = _free_port()
    server = [*VLLM, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *arguments]
    begin, deadline = time.monotonic(), time.monotonic() + job.timeout
    peak, batches = 0, []
    with _process(server, environ, log) as process:
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None:
                raise _failure(f"the {arm} server ended with status {process.returncode}", log)
            if time.monotonic() > deadline:
                raise _failure(f"the {arm} server was not up after {job.timeout:.0f} s", log)
            time.sleep(POLL_S)
        startup = time.monotonic() - begin
        say(f"server up after {startup:.0f} s")
        for size in job.batch_sizes:
            # The first one warms the server up for this load and is not kept.
            for result in (place / "warmup.json", place / f"serve-{size}.json"):
                _load(job, model, port, size, result, environ, deadline - time.monotonic(), place / "client.txt")
            peak = max(peak, memory_in_use())
            batches.append(_served(size, json.loads(result.read_text())))
            say(f"{size} at once: {batches[-1]['tokens_per_s']:.1f} tok/s")
    plugin = _plugin(place / "status", arm)
    return {"startup_s": startup, "kv_cache_tokens": None, "peak_memory_bytes": peak, "batches": batches, "plugin": plugin}


def _load(
    job: Job,
    model: pathlib.Path | str,
    port: int,
    size: int,
    result: pathlib.Path,
    environ: Mapping[str, str],
    timeout: float,
    log: pathlib.Path,
) -> None:
    arguments = {
        "--model": model,
        "--host": "127.0.0.1",
        "--port": port,
        "--dataset-name": "random",
        "--random-input-len": job.input_len,
        "--random-output-len": job.output_len,
        "--num-prompts": size if result.name == "warmup.json" else size * job.requests_per_slot,
        "--max-concurrency": size,
        "--result-dir": result.parent,
        "--result-filename": result.name,
    }
    words = [str(word) for pair in arguments.items() for word in pair]
    command = [*VLLM, "bench", "serve", *words, "--ignore-eos", "--save-result", "--disable-tqdm"]
    with _process(command, environ, log) as client:
        try:
            status = client.wait(timeout=max(timeout, 1.0))
        except subprocess.TimeoutExpired:
            raise _failure("vllm bench serve was not finished in time", log) from None
        if status != 0 or not result.exists():
            raise _failure(f"vllm bench serve failed with status {status}", log)


def _served(size: int, measured: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "batch_size": size,
        "tokens_per_s": measured["output_throughput"],
        "ttft_s": measured["median_ttft_ms"] / 1e3,
        "tpot_s": measured["median_tpot_ms"] / 1e3,
        "itl_s": measured["median_itl_ms"] / 1e3,
        "samples_s": {"ttft": measured.get("ttfts", [])},
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


# ---- proof


def _plugin(status: pathlib.Path, arm: str) -> dict[str, Any]:
    """What the engine's processes say of the plugin.

    Raises:
        BenchError: the run was not what it should be.
    """
    files = sorted(status.glob("moe-tune-*.json")) if status.exists() else []
    if arm == STOCK:
        if files:
            raise BenchError("the plugin was active in a stock run: something sets VLLM_PLUGINS behind the benchmark's back")
        return {"verdict": "stock", "processes": []}
    processes = [json.loads(file.read_text()) for file in files]
    if not processes:
        raise BenchError("the plugin was not active in a tuned run: no worker left its states; see vllm-moe-tune doctor")
    tunings = [tuning for process in processes for tuning in process["tunings"]]
    failed = [f"{tuning['name']} ({tuning['reason']})" for tuning in tunings if tuning["state"] == "failed"]
    if failed:
        raise BenchError(f"a tuning failed in a tuned run: {', '.join(dict.fromkeys(failed))}")
    ranks = [process for process in processes if any(patch["calls"] for own in process["tunings"] for patch in own["patches"])]
    for rank in ranks[1:]:
        differ = [
            f"{mine['name']} is {mine['state']} and {other['state']}"
            for mine, other in zip(ranks[0]["tunings"], rank["tunings"], strict=True)
            if mine["state"] != other["state"]
        ]
        if differ:
            raise BenchError(f"the ranks of a tuned run differ: {', '.join(differ)}")
    tuned = [tuning for tuning in tunings if tuning["tuned"]]
    if tuned:
        return {"verdict": f"tuned: {', '.join(dict.fromkeys(tuning['name'] for tuning in tuned))}", "processes": processes}
    idle = [tuning for tuning in tunings if tuning["state"] == "applied" and any(map(_saw_calls, tuning["patches"]))]
    if idle:
        names = ", ".join(dict.fromkeys(tuning["name"] for tuning in idle))
        return {"verdict": f"active, but {names} changed none of the calls that it saw", "processes": processes}
    # Native, unsupported or disabled, or applied to what this model does not call.
    return {"verdict": "nothing to tune", "processes": processes}


def _saw_calls(patch: Mapping[str, Any]) -> bool:
    """Whether a patch that is there to change calls saw any; one that only serves others sees calls and changes none."""
    return bool(patch["calls"]) and not patch.get("serves", True)


# ---- what the runs say together


def ratios(rows: Sequence[Mapping[str, Any]], batch_size: int, figure: str = "tokens_per_s") -> list[float]:
    """One ratio for each finished pair, above 1: tuned is better (for times, stock over tuned)."""
    runs = {(row["key"]["pair"], row["key"]["arm"]): row for row in rows if row["status"] == "ok"}
    found = []
    for pair in sorted({pair for pair, _ in runs}):
        if (pair, STOCK) in runs and (pair, TUNED) in runs:
            stock, tuned = (_batch(runs[pair, arm], batch_size)[figure] for arm in (STOCK, TUNED))
            found.append(tuned / stock if figure == "tokens_per_s" else stock / tuned)
    return found


def _batch(row: Mapping[str, Any], batch_size: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(batch for batch in row["batches"] if batch["batch_size"] == batch_size)
    return found


@dataclass(frozen=True)
class Parting:
    """Where two greedy answers to the same prompt part: which prompt, at which token, and how sure the first one was."""

    prompt: int
    position: int
    margin: float


def parting(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Parting]:
    """The places where the answers of two runs at one batch size part."""
    found = []
    for prompt, (mine, theirs) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        for position, (token, their) in enumerate(zip(mine, theirs, strict=True)):
            if token != their:
                found.append(Parting(prompt, position, one["margins"][prompt][position]))
                break
    return found


def agreement(rows: Sequence[Mapping[str, Any]], batch_size: int) -> str:
    """Whether the greedy tokens of stock and tuned runs are the same, and if not, whether stock runs agree with each other."""
    done = [row for row in rows if row["status"] == "ok" and "tokens" in _batch(row, batch_size)]
    stock = [_batch(row, batch_size) for row in done if row["key"]["arm"] == STOCK]
    tuned = [_batch(row, batch_size) for row in done if row["key"]["arm"] == TUNED]
    if not stock or not tuned:
        return "-"
    parted = [place for other in tuned for place in parting(stock[0], other)]
    if not parted:
        return "same"
    first = min(parted, key=lambda place: place.position)
    noise = [place for other in stock[1:] for place in parting(stock[0], other)]
    prompts = len({place.prompt for place in parted})
    also = f"; stock runs part, too, in {len({place.prompt for place in noise})}" if noise else ""
    return f"part in {prompts} of {len(stock[0]['tokens'])}, first at token {first.position} (margin {first.margin:.3f}){also}"
