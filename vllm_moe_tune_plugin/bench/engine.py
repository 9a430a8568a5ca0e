"""``bench engine``: vLLM's own benchmarks, stock and tuned in turn, each run in an engine of its own.

Runs go A B B A A B ..., so that each pair of neighbours is one stock and one tuned run and a slow drift of the machine falls
on both. Only ``VLLM_PLUGINS`` differs between them. A run counts when the states that the engine's own processes leave
(``MOE_TUNE_STATUS_DIR``) show that it was what it should be: a tuned one tuned, a stock one without the plugin.
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
PLUGINS = {STOCK: "", TUNED: "moe_tune"}
DRIVER = (sys.executable, "-m", "vllm_moe_tune_plugin.bench.driver")
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
POLL_S = 0.5

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


@dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        pairs: of one stock and one tuned run.
        timeout: seconds for one run.
        dp: data-parallel ranks, each an engine with prompts of its own and batches of ``batch_sizes``.
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
        return {"model": self.model, **settings}

    def order(self) -> list[tuple[int, str]]:
        """(pair, arm) of each run."""
        return [(pair, arm) for pair in range(self.pairs) for arm in ((STOCK, TUNED) if pair % 2 == 0 else (TUNED, STOCK))]


def run(job: Job, results: Results, say: Callable[[str], None]) -> None:
    """Do the runs that ``results`` lacks; each is saved when it is finished.

    Raises:
        BenchError: a run failed, or was not what it should be. The runs until then are saved.
    """
    with tempfile.TemporaryDirectory(prefix="moe-tune-bench-") as folder:
        model, arguments = _model(job, pathlib.Path(folder))
        for number, (pair, arm) in enumerate(job.order()):
            key = {"pair": pair, "arm": arm}
            name = f"run {number + 1}/{2 * job.pairs} ({arm})"
            if results.has(key):
                say(f"{name}: finished before")
                continue
            place = pathlib.Path(folder) / f"run-{number}"
            place.mkdir()
            log = place / "log.txt"
            say_here = functools.partial(_say, say, name)
            try:
                row = (_serve if job.serve else _latency)(job, model, arguments, arm, place, say_here)
                row["plugin"] = _plugin(place / "status", arm)
            except BenchError:
                _keep_log(job, log, number, arm)
                raise
            _keep_log(job, log, number, arm)
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


def _latency(
    job: Job, model: pathlib.Path | str, arguments: Sequence[str], arm: str, place: pathlib.Path, say: Callable[[str], None]
) -> dict[str, Any]:
    log, deadline = place / "log.txt", time.monotonic() + job.timeout
    environ, port = _environment(arm, place / "status"), _free_port()
    files, processes = [], []
    with contextlib.ExitStack() as ranks:
        for rank in range(job.dp):
            request, events_file = place / f"request-{rank}.json", place / f"events-{rank}.jsonl"
            wanted = {
                "model": str(model),
                "engine_args": list(arguments),
                "batch_sizes": list(job.batch_sizes),
                "input_len": job.input_len,
                "output_len": job.output_len,
                "iterations": job.iterations,
                "warmup": job.warmup,
                "greedy_tokens": job.greedy_tokens,
                "seed": rank,
            }
            request.write_text(json.dumps(wanted))
            command = [*job.driver, str(request), str(events_file)]
            own = {**environ, **_data_parallel(rank, job.dp, port)} if job.dp > 1 else environ
            processes.append(ranks.enter_context(_process(command, own, log)))
            files.append(events_file)
        seen = 0
        while True:
            statuses = [process.poll() for process in processes]
            events = [_events(file) for file in files]
            for event in events[0][seen:]:
                say(_event_line(event))
            seen = len(events[0])
            finished = all(own and own[-1]["event"] == "end" for own in events)
            if finished:
                for process in processes:
                    process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
            if any(statuses) or (None not in statuses and not finished):
                raise _failure(f"the {arm} run failed with status {next(filter(None, statuses), 0)}", log)
            if None not in statuses:
                break
            if time.monotonic() > deadline:
                raise _failure(f"the {arm} run was not finished after {job.timeout:.0f} s", log)
            time.sleep(POLL_S)
    return _summary(job, events)


def _data_parallel(rank: int, size: int, port: int) -> dict[str, str]:
    """What tells an engine that it is one of several ranks on this host."""
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(size),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }


def _events(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")  # the last line may still be written
    return [json.loads(line) for line in whole.splitlines()]


def _event_line(event: Mapping[str, Any]) -> str:
    if event["event"] == "started":
        return f"engine up after {event['seconds']:.0f} s"
    if event["event"] == "latency":
        return f"batch {event['batch_size']}: {stats.median(event['latencies_s']):.3f} s"
    return f"{event['event']} {event.get('batch_size', '')}".strip()


def _summary(job: Job, events: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """A run's row from what the drivers of all ranks told: a step is over when the slowest rank has made it."""

    def told(what: str) -> list[list[Mapping[str, Any]]]:
        """Each rank's events of a kind."""
        return [[event for event in own if event["event"] == what] for own in events]

    def slowest(name: str, ranks: Sequence[Mapping[str, Any]]) -> list[float]:
        return [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)]

    batches = []
    for ranks in zip(*told("latency"), strict=True):
        size, latencies, firsts = ranks[0]["batch_size"], slowest("latencies_s", ranks), slowest("ttft_s", ranks)
        latency, ttft = stats.median(latencies), stats.median(firsts)
        batches.append(
            {
                "batch_size": size,
                "tokens_per_s": job.dp * size * job.output_len / latency,
                "ttft_s": ttft,
                "tpot_s": (latency - ttft) / max(job.output_len - 1, 1),
                "samples_s": {"latency": latencies, "ttft": firsts},
            }
        )
    for batch, ranks in zip(batches, zip(*told("greedy"), strict=True), strict=False):
        batch |= {name: [answer for rank in ranks for answer in rank[name]] for name in ("tokens", "margins")}
    started = [own[0] for own in told("started")]
    return {
        "startup_s": max(event["seconds"] for event in started),
        "kv_cache_tokens": started[0]["kv_cache_tokens"],
        "peak_memory_bytes": max(own[-1]["peak_memory_bytes"] for own in events),
        "batches": batches,
    }


# ---- vllm serve, vllm bench serve


def _serve(
    job: Job, model: pathlib.Path | str, arguments: Sequence[str], arm: str, place: pathlib.Path, say: Callable[[str], None]
) -> dict[str, Any]:
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
    return {"startup_s": startup, "kv_cache_tokens": None, "peak_memory_bytes": peak, "batches": batches}


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
    tuned = [tuning for tuning in tunings if any(patch["tuned"] for patch in tuning["patches"])]
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
