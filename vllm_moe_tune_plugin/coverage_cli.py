"""The command ``vllm-moe-tune coverage``."""

from __future__ import annotations

import importlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from vllm_moe_tune_plugin import checkpoint
from vllm_moe_tune_plugin.coverage import (
    QUANTIZATIONS,
    Coverage,
    CoverageError,
    KernelCoverage,
    Serving,
    Side,
    examine,
)
from vllm_moe_tune_plugin.terminal import new_console

_MEANING = {
    "tuned": "a tactic tuned for as many tokens or more",
    "below": "a tactic tuned for fewer tokens: FlashInfer rounds down",
    "beyond": "a tactic tuned for fewer tokens: no larger bucket",
    "miss": "no tuned tactic: FlashInfer's default",
}


@click.command()
@click.option(
    "--model", type=click.Path(exists=True, path_type=pathlib.Path), help="A checkpoint's folder, for its config.json."
)
@click.option("--max-num-batched-tokens", "max_num_batched_tokens", type=click.IntRange(min=1), required=True)
@click.option("--dp", "dp_size", type=click.IntRange(min=1), default=1, show_default=True, help="Data-parallel size.")
@click.option("--tp", "tp_size", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor-parallel size.")
@click.option("--hidden-size", type=click.IntRange(min=1))
@click.option("--intermediate-size", type=click.IntRange(min=1), help="Of one expert.")
@click.option("--num-experts", type=click.IntRange(min=1))
@click.option("--top-k", type=click.IntRange(min=1))
@click.option("--quantization", type=click.Choice(QUANTIZATIONS), help="The experts' weights; without it, all kernels.")
@click.option("--cutlass-bucket", is_flag=True, help="As with MOE_TUNE_CUTLASS_BUCKET=1.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=pathlib.Path), help="Draw batch size against bucket (needs matplotlib)."
)
def coverage(model: pathlib.Path | None, as_json: bool, plot: pathlib.Path | None, **asked: Any) -> None:
    """Show for which batch sizes warm-up tunes FlashInfer's MoE kernels, stock and with the plugin."""
    try:
        known = checkpoint.experts_of(checkpoint.read(model)) if model is not None else {}
        found = examine(Serving(**{**known, **{name: value for name, value in asked.items() if value is not None}}))
    except (CoverageError, checkpoint.CheckpointError) as error:
        raise click.ClickException(str(error)) from error
    if plot is not None:
        draw(found, plot)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        _print(found)


def _print(found: Coverage) -> None:
    console = new_console()
    serving = found.serving
    console.print(
        f"vLLM {found.vllm}, FlashInfer {found.flashinfer}: an MoE layer sees up to {serving.tokens} tokens "
        f"({serving.max_num_batched_tokens} on each of {serving.dp_size} ranks)"
    )
    table = Table(
        "kernel",
        "",
        "bound",
        "warm-up tunes",
        "not covered",
        "batch sizes that are not covered",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for kernel in found.kernels:
        _, _, name = kernel.caller.rpartition(":")
        table.add_row(f"[bold]{kernel.kernel}[/]", "stock", *_cells(kernel.stock))
        table.add_row(f"  [bright_black]{escape(name)}[/]", "plugin", *_cells(kernel.plugin))
    console.print(table)
    for line in _costs(found.kernels):
        console.print(line)
    for limit in dict.fromkeys(limit for kernel in found.kernels for limit in kernel.limits):
        kernels = ", ".join(dict.fromkeys(kernel.kernel for kernel in found.kernels if limit in kernel.limits))
        console.print(f"[yellow]{kernels}[/]: {escape(limit)}")


def _cells(side: Side) -> Sequence[str]:
    buckets = f"{side.buckets[0]}..{side.buckets[-1]} ({len(side.buckets)})" if side.buckets else "nothing"
    share = side.uncovered
    return (str(side.bound), buckets, f"[{'red' if share else 'green'}]{share:.1%}[/]", escape(_uncovered(side)))


def _uncovered(side: Side) -> str:
    """The uncovered batch sizes: neighbours together, and the many short runs of rounding down only counted."""
    parts = []
    for served in ("miss", "beyond", "below"):
        runs: list[list[int]] = []
        for span in side.spans:
            if span.served == served and runs and runs[-1][1] + 1 == span.first:
                runs[-1][1] = span.last
            elif span.served == served:
                runs.append([span.first, span.last])
        if runs:
            where = ", ".join(f"{first}-{last}" for first, last in runs) if len(runs) <= 3 else f"{side.sizes(served)} sizes"
            parts.append(f"{where}: {_MEANING[served]}")
    return "; ".join(parts)


def _costs(kernels: Sequence[KernelCoverage]) -> Sequence[str]:
    """What the plugin's tuning costs, kernels with the same cost together."""
    costs: dict[tuple[tuple[int, ...], int, bool], list[str]] = {}
    for kernel in kernels:
        if kernel.extra_buckets:
            costs.setdefault((kernel.extra_buckets, kernel.extra_bytes, kernel.retained), []).append(kernel.kernel)
    lines = []
    for (buckets, size, retained), names in costs.items():
        stays = "which stays taken" if retained else "while it tunes"
        more = f"{len(buckets)} more profile{'s' * (len(buckets) > 1)} ({', '.join(map(str, buckets))})"
        lines.append(f"{', '.join(dict.fromkeys(names))}: {more}, about {size / 2**30:.2f} GiB more GPU memory {stays}")
    return lines or ["The plugin tunes no additional profile here."]


def draw(found: Coverage, target: pathlib.Path) -> None:
    """Draw batch size against bucket for each kernel, stock beside plugin.

    Raises:
        click.ClickException: matplotlib is not installed, or cannot write such a file.
    """
    try:
        figures, ticker = (importlib.import_module(f"matplotlib.{name}") for name in ("figure", "ticker"))
    except ImportError as error:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib") from error
    # Callers of one kernel with the same coverage are one picture.
    kinds: dict[tuple[str, Side, Side], None] = {(k.kernel, k.stock, k.plugin): None for k in found.kernels}
    if not kinds:
        raise click.ClickException("no FlashInfer MoE kernel serves this configuration")
    figure = figures.Figure(figsize=(12, 3.2 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 2, squeeze=False, sharex=True)
    colours = {"tuned": "tab:green", "below": "tab:olive", "beyond": "tab:orange", "miss": "tab:red"}
    for row, (name, stock, plugin) in zip(axes, kinds, strict=True):
        for axis, title, side in zip(row, ("stock", "with the plugin"), (stock, plugin), strict=True):
            for span in side.spans:
                axis.plot(
                    [span.first - 0.5, span.last + 0.5],
                    [span.bucket] * 2,
                    color=colours[span.served],
                    linewidth=3,
                    solid_capstyle="butt",
                )
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            for scale in (axis.xaxis, axis.yaxis):
                scale.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.0f}"))
            axis.set_title(f"{name}, {title}: {side.uncovered:.1%} not covered", fontsize="medium")
            axis.set_ylabel("bucket that is looked up (tokens)")
    for axis in axes[-1]:
        axis.set_xlabel("tokens in the batch, all ranks")
        axis.set_xlim(left=1)
    drawn = {span.served for _, stock, plugin in kinds for side in (stock, plugin) for span in side.spans}
    handles = [
        figure.axes[0].plot([], [], color=colours[served], linewidth=3, label=meaning)[0]
        for served, meaning in _MEANING.items()
        if served in drawn
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    try:
        figure.savefig(target)
    except (OSError, ValueError) as error:  # a ValueError lists the file types that there are
        raise click.ClickException(f"--plot cannot write {target}: {error}") from error
