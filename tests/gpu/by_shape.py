"""What the scripts that measure many shapes have in common: their options, the loop over shapes and dtypes, and the file."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from vllm_moe_tune_plugin.bench import layer, schema
from vllm_moe_tune_plugin.bench.cli import NUMBERS, one_of, parsed
from vllm_moe_tune_plugin.bench.layer import Machine
from vllm_moe_tune_plugin.bench.schema import BenchError
from vllm_moe_tune_plugin.bench.shapes import DTYPES, SHAPES, Shape

#: Of one shape and dtype, for these numbers of tokens and a copy's bytes a second: each row, and a line about it.
Measure = Callable[[Machine, Shape, str, Sequence[int], float], Iterator[tuple[dict[str, Any], str]]]


def _shapes(text: str) -> list[Shape]:
    return [Shape.parse(name) for name in text.split(",")]


def options(tokens: str) -> Callable[[Any], Any]:
    """The options of such a script; ``tokens`` is the default of its own."""

    def add(command: Any) -> Any:
        for option in (
            click.option("--interpret", is_flag=True, help="In Triton's interpreter; the times mean nothing."),
            click.option("--commit", default=""),
            click.option("--tokens", default=tokens, show_default=True, callback=NUMBERS),
            click.option("--dtypes", default="bf16,fp8-block", show_default=True, callback=parsed(one_of(DTYPES))),
            click.option(
                "--shapes",
                default=",".join(SHAPES),
                show_default=True,
                callback=parsed(_shapes),
                help="Names, separated by commas.",
            ),
            click.argument("out", type=click.Path(dir_okay=False, path_type=pathlib.Path)),
        ):
            command = option(command)
        return command

    return add


def run(measure: Measure, out: pathlib.Path, interpret: bool, **options: Any) -> None:
    try:
        schema.require_writable(out.parent)
        _run(measure, out, layer.start(interpret), **options)
    except BenchError as error:
        raise click.ClickException(str(error)) from error


def _run(
    measure: Measure,
    out: pathlib.Path,
    machine: Machine,
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    tokens: Sequence[int],
    commit: str,
) -> None:
    import torch

    rows: list[dict[str, Any]] = []
    with torch.inference_mode(), layer.vllm_config():
        bandwidth = machine.copy_bandwidth()
        for shape in shapes:
            for dtype in (name for name in dtypes if not shape.refusal(name, 1)):
                for row, line in measure(machine, shape, dtype, tokens, bandwidth):
                    rows.append(row)
                    click.echo(line)
                machine.free_bytes()
                # After each shape: it may be stopped at any time.
                result = {"environment": schema.environment(commit), "bandwidth": bandwidth, "rows": rows}
                out.write_text(json.dumps(result, indent=1))
