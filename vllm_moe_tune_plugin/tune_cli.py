"""The command ``vllm-moe-tune tune``."""

from __future__ import annotations

import dataclasses
import pathlib

import click
from rich.table import Table

from vllm_moe_tune_plugin import checkpoint, tuned_tiles
from vllm_moe_tune_plugin.bench import schema
from vllm_moe_tune_plugin.bench.schema import BenchError
from vllm_moe_tune_plugin.bench.shapes import DTYPES, Shape
from vllm_moe_tune_plugin.terminal import new_console


@click.command()
@click.option(
    "--model", type=click.Path(exists=True, path_type=pathlib.Path), help="A checkpoint's folder, for its config.json."
)
@click.option("--shape", "shape_text", help="Instead of a model: a name of `bench layer`, or E,topk,N,K.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the experts' weights; without it, the model's, or bf16.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor-parallel size.")
@click.option("--ep", type=click.IntRange(min=1), default=1, show_default=True, help="Expert-parallel size.")
@click.option("--seconds", default=45.0, show_default=True, help="Time for the search.")
@click.option("--cache-dir", type=click.Path(file_okay=False, path_type=pathlib.Path), envvar="MOE_TUNE_CACHE_DIR")
@click.option("-v", "--verbose", is_flag=True, help="Show what was tried.")
@click.option("--interpret", is_flag=True, help="A tiny shape in Triton's interpreter; the times mean nothing.")
def tune(
    model: pathlib.Path | None,
    shape_text: str | None,
    dtype: str | None,
    tp: int,
    ep: int,
    seconds: float,
    cache_dir: pathlib.Path | None,
    verbose: bool,
    interpret: bool,
) -> None:
    """Search the decode kernel's tiles and window for one MoE layer on this GPU, whichever it is.

    Engines on the same GPU model read the result when they start. Give all nodes of a deployment the same files.
    """
    from vllm_moe_tune_plugin import gpu
    from vllm_moe_tune_plugin.bench import layer, search

    console = new_console()
    if (model is None) == (shape_text is None):
        raise click.UsageError("name one layer: by --model or by --shape")
    try:
        if model is not None:
            shape, told = checkpoint.layer_of(checkpoint.read(model), tp)
        else:
            shape, told = Shape.parse(str(shape_text)), "bf16"
            if shape.intermediate % tp:
                raise BenchError(f"{tp} ranks cannot share an intermediate size of {shape.intermediate}")
            shape = dataclasses.replace(shape, intermediate=shape.intermediate // tp)
        dtype = dtype or told
        plan = search.Plan.interpreted(seconds) if interpret else search.Plan(seconds)
        folder = cache_dir or tuned_tiles.default_folder()
        schema.require_writable(folder)  # before the search, whose result would be lost
        machine = layer.start(interpret)
        found = search.search(shape, dtype, ep, machine, plan, console.print if verbose else lambda line: None)
        on = gpu.name(machine.device)
        environment = schema.environment("")
        path = tuned_tiles.save(
            folder,
            on,
            tuned_tiles.Problem.of(shape, dtype, ep),
            found.entry,
            ratios={str(row["key"]["tokens"]): row["ratio"] for row in found.rows},
            found_with={name: environment[name] for name in ("time", "vllm", "torch", "triton", "plugin")},
        )
    except (BenchError, checkpoint.CheckpointError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error

    table = Table("tokens", "stock us", "tuned us", "ratio", box=None, padding=(0, 2, 0, 0))
    for row in found.rows:
        times = (f"{row['median_us'][arm]:.1f}" for arm in ("stock", "tuned"))
        table.add_row(str(row["key"]["tokens"]), *times, f"{row['ratio']:.3f}")
    console.print(table)
    best = "none better than" if found.entry.tiles is None else f"the best are {found.speed_up:.2f} times as fast as"
    console.print(f"{found.tried} tiles tried; {best} the formula's")
    most = found.entry.tokens
    serves = f"the decode kernel serves up to {most} token{'s' * (most > 1)}" if most else "stock is as fast: it stays stock"
    console.print(serves)
    console.print(f"saved to {path}; engines on {on} read it")
