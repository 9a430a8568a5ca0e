"""What ``vllm-moe-tune tune`` found on this machine: tiles and window of the decode kernel, one file for each GPU model.

The search runs where the user asks for it; an engine only reads its result, once, when it first needs it. A file that cannot
be read, or an entry that the kernels could not take, is told once and counts as absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_moe_tune_plugin.settings import Settings

if TYPE_CHECKING:
    from vllm_moe_tune_plugin.bench.shapes import Shape

logger = logging.getLogger("vllm.moe_tune")

#: The fields of a kernel's tiles and the largest value of each.
LIMITS: Mapping[str, int] = {
    "up_rows": 16,
    "up_columns": 8192,
    "up_warps": 16,
    "down_rows": 16,
    "down_columns": 8192,
    "down_warps": 16,
    "down_ahead": 64,
}
#: The largest window that is searched.
MOST_TOKENS = 16
#: What is raised for a file that cannot be read, or an entry that the kernels could not take.
_NO_SENSE = (OSError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class Problem:
    """A layer as one rank holds it.

    Attributes:
        num_experts: E, of the layer on all ranks.
        local_experts: of this rank.
        top_k: experts for each token.
        intermediate: N, on this rank.
        hidden: K.
        dtype: `bf16`, `fp16`, `fp8` (scales for each tensor or channel) or `fp8-block`.
    """

    num_experts: int
    local_experts: int
    top_k: int
    intermediate: int
    hidden: int
    dtype: str

    @property
    def is_shared(self) -> bool:
        """Whether other ranks hold some of the experts."""
        return self.local_experts < self.num_experts

    @classmethod
    def of(cls, shape: Shape, dtype: str, ep: int) -> Problem:
        """A layer whose experts are shared out to ``ep`` ranks."""
        return cls(shape.num_experts, shape.num_experts // ep, shape.top_k, shape.intermediate, shape.hidden, dtype)


@dataclass(frozen=True)
class Entry:
    """What was found for a problem.

    Attributes:
        tokens: the most tokens with which the kernels won; 0: never.
        tiles: the fields of :class:`~vllm_moe_tune_plugin.kernels.decode_moe.Tiles`, None where none were better than the
            formula's, which knows the number of tokens.
    """

    tokens: int
    tiles: Mapping[str, int] | None

    def __post_init__(self) -> None:
        if not 0 <= self.tokens <= MOST_TOKENS:
            raise ValueError(f"{self.tokens} tokens")
        if self.tiles is None:
            return
        if self.tiles.keys() != LIMITS.keys():
            raise ValueError(f"tiles {sorted(self.tiles)}")
        for name, value in self.tiles.items():
            least = 16 if name.endswith("columns") else 1
            if type(value) is not int or not least <= value <= LIMITS[name]:
                raise ValueError(f"{name} {value}")
            if value & (value - 1) and name != "down_ahead":
                raise ValueError(f"{name} {value}, which is no power of two")


def default_folder() -> pathlib.Path:
    """The user's cache."""
    # Not Path.home(), which raises where a container's user has no home.
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "vllm-moe-tune-plugin"


def folder_of(settings: Settings) -> pathlib.Path:
    """Where engines with these settings look."""
    return pathlib.Path(settings.cache_dir) if settings.cache_dir else default_folder()


def file_of(folder: pathlib.Path, gpu: str) -> pathlib.Path:
    return folder / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def save(folder: pathlib.Path, gpu: str, problem: Problem, entry: Entry, **more: Any) -> pathlib.Path:
    """Add an entry to a GPU model's file, or replace the one for the same problem.

    Args:
        more: what else to keep with the entry, for a person who reads the file.
    """
    path = file_of(folder, gpu)
    layers = _others(path, problem)
    layers.append(
        {"problem": dataclasses.asdict(problem), "tokens": entry.tokens, "tiles": entry.tiles and dict(entry.tiles), **more}
    )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json", delete=False) as file:
        json.dump({"gpu": gpu, "layers": layers}, file, indent=1)
    os.replace(file.name, path)  # an engine that starts meanwhile reads the old file or the new one
    load.cache_clear()
    return path


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = json.loads(path.read_text())["layers"]
    return layers


def _parse(layer: Mapping[str, Any]) -> tuple[Problem, Entry]:
    return Problem(**layer["problem"]), Entry(layer["tokens"], layer["tiles"])


def _others(path: pathlib.Path, problem: Problem) -> list[dict[str, Any]]:
    """What a file holds for other problems, without what makes no sense: for that, engines leave the whole file aside."""
    others = []
    with contextlib.suppress(*_NO_SENSE):
        for layer in _read(path):
            with contextlib.suppress(*_NO_SENSE):
                # A dict as engines make one: a problem of lists cannot be looked up.
                if problem not in dict([_parse(layer)]):
                    others.append(layer)
    return others


@functools.cache
def load(folder: pathlib.Path, gpu: str) -> Mapping[Problem, Entry]:
    """All entries for a GPU model."""
    path = file_of(folder, gpu)
    try:
        return dict(map(_parse, _read(path)))
    except FileNotFoundError:
        return {}
    except _NO_SENSE as error:
        logger.warning("moe-tune: %s is left aside, run `vllm-moe-tune tune` again: %s", path, error)
        return {}


_trial: Entry | None = None


@contextlib.contextmanager
def trial(entry: Entry) -> Iterator[None]:
    """Give this entry for every problem, while it is being measured."""
    global _trial
    before, _trial = _trial, entry
    try:
        yield
    finally:
        _trial = before


def look_up(folder: pathlib.Path, gpu: str, problem: Problem) -> Entry | None:
    """The entry for a problem, None where nobody has searched."""
    return _trial or load(folder, gpu).get(problem)
