"""A whole vLLM engine on the CPU: its own entry point loads the plugin in every process, and the tokens stay.

Weights and prompts are new in each session.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cpu_engine import HERE, RELEASE, environment, needs_engine

TUNINGS = {"autotune_bucket", "tuple_routing", "int32_ids", "low_latency_assignment"}
PROMPT_LENGTHS = (2, 3, 4, 5)
# The batch shrinks from 4 sequences to 1 while it decodes: both sides of the boundary of the low-latency assignment.
COMPLETION_LENGTHS = (4, 5, 7, 9)
LIMIT_S = 600

pytestmark = needs_engine


@dataclass
class Process:
    command: list[str]
    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.events if entry["event"] == event]

    @property
    def role(self) -> str:
        """What vLLM started this process for, by its command line alone."""
        if "--multiprocessing-fork" in self.command:
            return "engine"  # EngineCore, and the worker where the release has one apart from it
        if self.command[-2:] == ["-m", "vllm.model_executor.models.registry"]:
            return "model inspection"
        if str(HERE / "serve_once.py") in self.command:
            return "frontend"
        return "other"


@dataclass
class Completion:
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Run:
    completions: list[Completion]
    processes: dict[int, Process]
    frontend: int
    output: str

    def pids(self, *roles: str) -> set[int]:
        return {pid for pid, process in self.processes.items() if process.role in roles}

    def count(self, event: str) -> dict[int, int]:
        counts = {pid: len(process.of(event)) for pid, process in self.processes.items()}
        return {pid: count for pid, count in counts.items() if count}

    @property
    def workers(self) -> set[int]:
        return set(self.count("experts"))

    @property
    def experts(self) -> list[dict[str, Any]]:
        return [launch for process in self.processes.values() for launch in process.of("experts")]


Start = Callable[..., tuple[str, dict[int, Process]]]
Serve = Callable[[str | None], Run]


def read_journal(path: Path) -> dict[int, Process]:
    processes: dict[int, Process] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["event"] == "start":
            processes[entry["pid"]] = Process(entry["command"])
        processes[entry["pid"]].events.append(entry)
    return processes


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 MoE model of a few hundred kilobytes whose experts decide the tokens."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("tiny_qwen3_moe")
    text = (HERE / "tiny_qwen3_moe" / "config.json").read_text()
    (folder / "config.json").write_text(text)
    config = json.loads(text)
    hidden, narrow = config["hidden_size"], config["moe_intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    seed = torch.seed()
    print(f"weights of seed {seed}")

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns) * gain * columns**-0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden) * 0.5,
        "model.norm.weight": torch.rand(hidden) + 0.5,
        "lm_head.weight": matrix(config["vocab_size"], hidden, 4.0),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        weights |= {
            f"{layer}.input_layernorm.weight": torch.rand(hidden) + 0.5,
            f"{layer}.post_attention_layernorm.weight": torch.rand(hidden) + 0.5,
            f"{layer}.self_attn.q_proj.weight": matrix(queries, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(keys, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(keys, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, queries),
            f"{layer}.self_attn.q_norm.weight": torch.rand(config["head_dim"]) + 0.5,
            f"{layer}.self_attn.k_norm.weight": torch.rand(config["head_dim"]) + 0.5,
            f"{layer}.mlp.gate.weight": matrix(config["num_experts"], hidden, 2.0),
        }
        for expert in range(config["num_experts"]):
            experts = f"{layer}.mlp.experts.{expert}"
            weights[f"{experts}.gate_proj.weight"] = matrix(narrow, hidden, 2.0)
            weights[f"{experts}.up_proj.weight"] = matrix(narrow, hidden, 2.0)
            weights[f"{experts}.down_proj.weight"] = matrix(hidden, narrow, 2.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def prompts(checkpoint: Path) -> list[list[int]]:
    import torch

    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    return [torch.randint(3, vocabulary, (length,)).tolist() for length in PROMPT_LENGTHS]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Run Python to its end in an environment where every process of it keeps the journal."""
    # vLLM keeps what it learnt of a model class here. New for the session: the first engine has to inspect the model.
    cache = tmp_path_factory.mktemp("vllm_cache")

    def run(plugins: str | None, *arguments: str) -> tuple[str, dict[int, Process]]:
        folder = tmp_path_factory.mktemp("site")
        chosen = {} if plugins is None else {"VLLM_PLUGINS": plugins}
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment(folder, cache) | chosen,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout[-10000:]
        return done.stdout, read_journal(folder / "journal.jsonl")

    return run


@pytest.fixture(scope="session")
def serve(start: Start, checkpoint: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Serve:
    def run(plugins: str | None) -> Run:
        folder = tmp_path_factory.mktemp("engine")
        request, result = folder / "request.json", folder / "result.json"
        request.write_text(json.dumps({"model": str(checkpoint), "prompts": prompts, "lengths": COMPLETION_LENGTHS}))
        output, processes = start(plugins, str(HERE / "serve_once.py"), str(request), str(result))
        answer = json.loads(result.read_text())
        return Run([Completion(**given) for given in answer["completions"]], processes, answer["pid"], output)

    return run


@pytest.fixture(scope="session")
def with_plugin(serve: Serve) -> Run:
    return serve(None)


@pytest.fixture(scope="session")
def without_plugin(serve: Serve, with_plugin: Run) -> Run:
    # After the other run, so that this one finds the model inspected and starts a process less.
    return serve("")


def test_entry_point_is_installed() -> None:
    (found,) = [point for point in metadata.entry_points(group="vllm.general_plugins") if point.name == "moe_tune"]
    assert found.value == "vllm_moe_tune_plugin:register"


@pytest.mark.parametrize(
    ("plugins", "loaded"),
    [(None, 1), ("moe_tune", 1), ("another,moe_tune", 1), ("another", 0), ("", 0)],
    ids=["unset", "named", "among others", "another", "empty"],
)
def test_loader_follows_the_allow_list(start: Start, plugins: str | None, loaded: int) -> None:
    # Twice, as a process may: vLLM itself lets only the first call through.
    script = "from vllm.plugins import load_general_plugins as load; load(); load()"
    _, processes = start(plugins, "-c", script)

    assert sum(len(process.of("register")) for process in processes.values()) == loaded


def test_engine_loads_the_plugin_in_every_process(with_plugin: Run) -> None:
    inspection, engine = with_plugin.pids("model inspection"), with_plugin.pids("engine")

    assert with_plugin.pids("frontend") == {with_plugin.frontend}
    assert len(inspection) == 1
    assert len(with_plugin.workers) == 1
    assert with_plugin.workers <= engine  # a process of its own or EngineCore's, but never the frontend's
    assert with_plugin.count("register") == dict.fromkeys({with_plugin.frontend} | inspection | engine, 1)


def test_each_process_that_is_seen_logs_one_line(with_plugin: Run) -> None:
    seen = {with_plugin.frontend} | with_plugin.pids("engine")
    lines = with_plugin.count("line")
    beginning = f"moe-tune {metadata.version('vllm-moe-tune-plugin')}"

    # vLLM swallows what its model inspection prints; whether it sets up logging there differs by release.
    assert {pid: lines[pid] for pid in lines if pid in seen} == dict.fromkeys(seen, 1)
    assert lines.keys() - seen <= with_plugin.pids("model inspection")
    for process in with_plugin.processes.values():
        for line in process.of("line"):
            assert line["level"] == "INFO"
            assert line["message"].startswith(beginning)
            assert dict(re.findall(r"(\w+)=(\w+)", line["message"])).keys() >= TUNINGS
    shown = [line for line in with_plugin.output.splitlines() if beginning in line]
    assert len(shown) == len(seen)
    assert all(" INFO " in f" {line}" for line in shown)


def test_empty_allow_list_keeps_the_plugin_out(without_plugin: Run) -> None:
    assert without_plugin.pids("frontend", "engine")
    assert without_plugin.count("register") == {}
    assert without_plugin.count("line") == {}
    assert "moe-tune" not in without_plugin.output


def test_tokens_are_the_same_with_and_without(with_plugin: Run, without_plugin: Run) -> None:
    assert [len(completion.tokens) for completion in with_plugin.completions] == list(COMPLETION_LENGTHS)
    for ours, stock in zip(with_plugin.completions, without_plugin.completions, strict=True):
        assert ours.tokens == stock.tokens
        assert ours.logprobs == pytest.approx(stock.logprobs, abs=1e-4)


def test_tokens_are_those_of_a_dense_reference(with_plugin: Run, checkpoint: Path, prompts: list[list[int]]) -> None:
    """The same checkpoint in transformers, in float64 and without vLLM."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, experts_implementation="eager")
    for prompt, completion in zip(prompts, with_plugin.completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
        best = logits.log_softmax(-1).max(-1)
        assert completion.tokens == best.indices.tolist()
        assert completion.logprobs == pytest.approx(best.values.tolist(), abs=1e-3)


def test_experts_take_the_low_latency_assignment(with_plugin: Run, without_plugin: Run, checkpoint: Path) -> None:
    """0.14 to 0.19 have it in the kernel and leave TritonExperts without; from 0.20 it is upstream's."""
    config = json.loads((checkpoint / "config.json").read_text())
    top_k, experts = config["num_experts_per_tok"], config["num_experts"]
    largest = experts // 4 // top_k
    for run in (with_plugin, without_plugin):
        batches = {launch["assignments"] // top_k for launch in run.experts}
        assert {1, largest, largest + 1} <= batches
        native = RELEASE is not None and RELEASE >= (0, 20)
        limit = largest if run is with_plugin or native else 0
        wrong = [launch for launch in run.experts if launch["sorted"] != (launch["assignments"] > limit * top_k)]
        assert wrong == []
