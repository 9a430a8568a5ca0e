"""The files of results: what the schema lets through, and what reading and resuming make of it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic

from vllm_moe_tune_plugin.bench import schema
from vllm_moe_tune_plugin.bench.schema import BenchError, Results
from vllm_moe_tune_plugin.bench.shapes import SHAPES

SHAPE = SHAPES["qwen3-30b-a3b"]
SCHEMA = json.loads(Path(schema.__file__).with_name("schema.json").read_text())


def layer_results(**options: Any) -> dict[str, Any]:
    return synthetic.layer_results(**({"shapes": [SHAPE], "tokens": (1, 2), "dtypes": ("bf16",), "rounds": 2} | options))


def write(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(schema.dump(data))
    return path


def fields(part: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every named field of a schema."""
    if isinstance(part, list):
        for item in part:
            yield from fields(item, path)
    elif isinstance(part, dict):
        for name, value in part.items():
            if name in ("properties", "$defs"):
                for field, what in value.items():
                    yield f"{path}.{field}", what
                    yield from fields(what, f"{path}.{field}")
            elif name not in ("if", "then", "else"):
                yield from fields(value, path)


def test_every_field_is_described() -> None:
    definitions = SCHEMA["$defs"]
    found = dict(fields(SCHEMA))
    assert len(found) > 80
    for path, what in found.items():
        if path.removeprefix(".") in definitions or path == ".tunings" or what.get("$ref") or path.endswith(".tunings"):
            continue
        assert what.get("description"), path


@pytest.mark.parametrize(
    "data",
    [
        layer_results(),
        layer_results(control=True),
        layer_results(shapes=[SHAPES["gpt-oss-20b"]], dtypes=("fp8-block",)),
        synthetic.engine_results((1, 8)),
        synthetic.engine_results((1, 8), kind="serve"),
        synthetic.engine_results((1, 8), together=True),
    ],
    ids=["layer", "control", "unsupported", "engine", "serve", "together"],
)
def test_what_is_written_is_read(tmp_path: Path, data: dict[str, Any]) -> None:
    assert schema.read(write(tmp_path / "results.json", data)) == data


def _drop_commit(data: dict[str, Any]) -> None:
    del data["environment"]["commit"]


def _add_field(data: dict[str, Any]) -> None:
    data["rows"][0]["colour"] = "blue"


def _drop_ratio(data: dict[str, Any]) -> None:
    del data["rows"][1]["ratio"]


def _hide_failure(data: dict[str, Any]) -> None:
    data["rows"][0]["status"] = "oom"


def _engine_rows(data: dict[str, Any]) -> None:
    data["kind"] = "engine"


def _infinite(data: dict[str, Any]) -> None:
    data["rows"][0]["samples_us"]["stock"][0] = "fast"


@pytest.mark.parametrize("spoil", [_drop_commit, _add_field, _drop_ratio, _hide_failure, _engine_rows, _infinite])
def test_what_does_not_follow_the_schema_is_refused_in_one_line(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None]
) -> None:
    data = layer_results()
    spoil(data)
    with pytest.raises(BenchError, match=r"results\.json does not follow the schema: \$") as refused:
        schema.read(write(tmp_path / "results.json", data))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "no file of results"),
        ('{"format": 2, "kind": "layer"}', "no file of results of this version"),
    ],
)
def test_what_is_no_file_of_results(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        schema.read(path)


def test_finished_rows_are_kept_and_others_are_done_again(tmp_path: Path) -> None:
    data = layer_results(tokens=(1, 2, 4, 8))
    data["rows"][1] = {name: data["rows"][1][name] for name in ("key", "problem")} | {
        "status": "oom",
        "reason": "out of memory",
    }
    data["rows"][2] |= {"status": "failed", "reason": "wrong output of tuned"}
    path = write(tmp_path / "results.json", data)
    results = Results(path, "layer", data["environment"] | {"time": "later"}, data["method"])

    assert results.resume() == len(data["rows"]) - 2
    assert results.rows == data["rows"][:1] + data["rows"][3:]
    assert [results.has(row["key"]) for row in data["rows"][:4]] == [True, False, False, True]
    results.add(data["rows"][1])
    assert schema.read(path)["rows"] == results.rows
    assert results.data["bandwidth"] == data["bandwidth"]


@pytest.mark.parametrize("change", [{"driver": "580.2"}, {"vllm": "0.33.0"}, {"commit": ""}])
def test_rows_of_another_environment_are_left_alone(tmp_path: Path, change: dict[str, str]) -> None:
    data = layer_results()
    path = write(tmp_path / "results.json", data)
    before = path.read_text()
    (name,) = change
    with pytest.raises(BenchError, match=rf"another environment \({name}: .*\); name another --output"):
        Results(path, "layer", data["environment"] | change, data["method"]).resume()
    assert path.read_text() == before


def test_a_folder_that_cannot_be_written_to_is_told_before_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data = layer_results()
    for folder, why in (("file", "File exists"), ("file/more", "Not a directory")):
        with pytest.raises(BenchError, match=f"{folder} cannot be written to: {why}; name another folder"):
            Results(tmp_path / folder / "results.json", "layer", data["environment"], data["method"]).resume()
