"""The command ``vllm-moe-tune``."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from vllm_moe_tune_plugin import __version__
from vllm_moe_tune_plugin.bench.cli import bench
from vllm_moe_tune_plugin.coverage_cli import coverage
from vllm_moe_tune_plugin.ledger import State
from vllm_moe_tune_plugin.settings import HELP
from vllm_moe_tune_plugin.terminal import new_console
from vllm_moe_tune_plugin.tune_cli import tune

_COLOURS = {
    State.APPLIED: "green",
    State.NATIVE: "cyan",
    State.PENDING: "yellow",
    State.UNSUPPORTED: "yellow",
    State.DISABLED: "bright_black",
    State.FAILED: "bold red",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vllm-moe-tune")
def main() -> None:
    """MoE tunings for stock vLLM: see what they do here."""


main.add_command(bench)
main.add_command(coverage)
main.add_command(tune)


@main.command()
@click.option("-v", "--verbose", is_flag=True, help="Show every patch with its target and reason.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--model",
    type=click.Path(exists=True, path_type=pathlib.Path),
    help="A checkpoint's folder: also tell for how many tokens the decode kernel serves its MoE layers.",
)
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor-parallel size of the model.")
@click.option("--ep", type=click.IntRange(min=1), default=1, show_default=True, help="Its expert-parallel size.")
def doctor(verbose: bool, as_json: bool, model: pathlib.Path | None, tp: int, ep: int) -> None:
    """Show the installed stack, the settings and what became of each tuning.

    Exits with 1 where a tuning failed.
    """
    from vllm_moe_tune_plugin.doctor import DoctorError, examine, has_failed, layer_of

    if model is None and (tp, ep) != (1, 1):
        raise click.UsageError("--tp and --ep are a model's: name it by --model")
    try:
        look = examine(None if model is None else layer_of(model, tp, ep))
    except DoctorError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(look, indent=2))
    else:
        _print_look(look, verbose)
    sys.exit(1 if has_failed(look) else 0)


def _print_look(look: dict[str, Any], verbose: bool) -> None:
    console = new_console()
    stack = look["stack"]
    packages = ("vllm", "flashinfer-python", "torch", "triton", "wrapt", "python")
    console.print(f"moe-tune {stack['plugin']} with", ", ".join(f"{name} {stack[name] or 'absent'}" for name in packages))
    console.print("GPU:", stack["gpu"] or "none")
    loads = "yes" if stack["loaded"] else f"no: {stack['not_loaded_because']}"
    console.print("vLLM loads the plugin:", escape(loads))

    settings = Table("setting", "value", "meaning", box=None, padding=(0, 2, 0, 0))
    for name, meaning in HELP.items():
        value = look["settings"][name.removeprefix("MOE_TUNE_").lower()]
        shown = ",".join(value) if isinstance(value, list) else str(value)
        settings.add_row(name, shown or "-", meaning)
    console.print(settings)
    for complaint in look["settings"]["complaints"]:
        console.print(f"[yellow]{escape(complaint)}[/]")

    for tuning in look["tunings"]:
        console.print(f"[bold]{tuning['name']}[/]: {_coloured(tuning['state'])}", _because(tuning["reason"]))
        for patch in tuning["patches"] if verbose else ():
            console.print(f"    {escape(patch['target'])}: {_coloured(patch['state'])}", _because(patch["reason"]))
    if "layer" in look:
        layer = look["layer"]
        tokens = layer["decode_tokens"]
        serves = f"with TritonExperts the decode kernel up to {tokens} tokens, stock beyond" if tokens else "stock"
        console.print(f"[bold]{escape(layer['model'])}[/]: {serves}", _because(layer["reason"]))


@main.command()
def selftest() -> None:
    """Run each tuning's code on this machine against a reference.

    Needs no GPU: Triton's interpreter stands in. Exits with 1 where a check fails.
    """
    from vllm_moe_tune_plugin.selftest import SelftestError, run

    try:
        checks = run()
    except SelftestError as error:
        raise click.ClickException(str(error)) from error
    table = Table("check", "acted", "stock", "tuned", "", box=None, padding=(0, 2, 0, 0))
    for check in checks:
        table.add_row(check.what, check.tunings or "-", check.stock, check.tuned, "pass" if check.passed else "[red]FAIL[/]")
    new_console().print(table)
    failed = sum(not check.passed for check in checks)
    click.echo(f"{len(checks) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


def _because(reason: str) -> str:
    return f"[bright_black]({escape(reason)})[/]" if reason else ""


def _coloured(state: str) -> str:
    return f"[{_COLOURS[State(state)]}]{state}[/]"
