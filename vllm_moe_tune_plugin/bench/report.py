"""``bench report``: what the files of results say, as tables for a terminal and in Markdown, and as parts of a README.

A table belongs to one file. Only plots put several files side by side (:mod:`.plots`), and only files of one machine.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from vllm_moe_tune_plugin.bench import engine, schema, stats
from vllm_moe_tune_plugin.bench.schema import MACHINE, BenchError

GIB = 2**30

#: Columns of text among those of numbers.
TOKENS, TUNINGS, REMARKS = "greedy tokens", "tunings that changed calls", "remarks"


@dataclass(frozen=True)
class Source:
    """One file of results; its name is the file's stem."""

    name: str
    data: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.data["kind"])

    @property
    def environment(self) -> Mapping[str, Any]:
        environment: Mapping[str, Any] = self.data["environment"]
        return environment

    @property
    def method(self) -> Mapping[str, Any]:
        method: Mapping[str, Any] = self.data["method"]
        return method

    def rows(self) -> list[Mapping[str, Any]]:
        """The rows that have figures."""
        return [row for row in self.data["rows"] if row["status"] == "ok"]


@dataclass(frozen=True)
class Sheet:
    """A table before it is drawn. Its first ``words`` columns hold text, and ``note`` says what the figures are."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int
    note: str


def load(paths: Sequence[pathlib.Path]) -> list[Source]:
    """Read files of results.

    Raises:
        BenchError: one is none, or two have the same stem.
    """
    sources = [Source(path.stem, schema.read(path)) for path in paths]
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise BenchError(f"two files are named {name}: parts and plots go by that name")
    return sources


def machines_differ(sources: Sequence[Source]) -> str | None:
    """Why the files cannot stand side by side, None where they can."""
    for source in sources[1:]:
        for name in MACHINE:
            here, there = source.environment[name], sources[0].environment[name]
            if here != there:
                return f"{sources[0].name} and {source.name} are of different machines ({name}: {there!r}, {here!r})"
    return None


def headline(source: Source) -> str:
    """Where the figures come from, in one line."""
    environment = source.environment
    packages = (("vLLM", "vllm"), ("torch", "torch"), ("Triton", "triton"), ("FlashInfer", "flashinfer-python"))
    where = environment["gpu"] or "no GPU"
    if environment["driver"]:
        where += f", driver {environment['driver']}"
    versions = ", ".join(f"{title} {environment[name]}" for title, name in packages if environment[name])
    commit = f" at {environment['commit']}" if environment["commit"] else ""
    return f"{where}; {versions}; plugin {environment['plugin']}{commit}; {environment['time'][:10]}"


def subject(source: Source) -> str:
    """What was run, in a few words."""
    more = " ".join(source.method.get("engine_args", ()))
    return workload(source) + (f", {more}" if more else "")


def workload(source: Source) -> str:
    """The same without an engine's arguments: its model and what it was asked for."""
    method = source.method
    if source.kind == "layer":
        return "one MoE layer" + (", in Triton's interpreter: the times mean nothing" if method["interpreted"] else "")
    lengths = f"{method['input_len']} tokens in, {method['output_len']} out"
    name = pathlib.PurePath(method["model"]).name
    ranks = f", a batch on each of {method['dp']} data-parallel ranks" if "dp" in method else ""
    return f"{name}, {lengths}{ranks}" + (", under load" if source.kind == "serve" else "")


# ---- what the tables say


def sheets(source: Source) -> list[Sheet]:
    """All of a file."""
    if source.kind == "layer":
        return [_layer_sheet(source)]
    return [_speed_sheet(source), _latency_sheet(source), _runs_sheet(source)]


def summary(source: Source) -> Sheet:
    """The part of a file that a README shows."""
    return _layer_summary(source) if source.kind == "layer" else _engine_summary(source)


def shape_name(key: Mapping[str, Any]) -> str:
    return str(key["shape"]) + (f" EP{key['ep']}" if key["ep"] > 1 else "")


def layer_line(row: Mapping[str, Any]) -> str:
    """One row for a log: what a terminal without a cursor shows while the benchmark runs."""
    key = row["key"]
    name = f"{shape_name(key)} {key['dtype']} {key['routing']} M={key['tokens']}"
    if row["status"] != "ok":
        return f"{name}: {row['status']}: {row['reason']}"
    stock, tuned = row["median_us"]["stock"], row["median_us"]["tuned"]
    return f"{name}: {stock:.1f} us stock, {tuned:.1f} us tuned, x{row['ratio']:.3f}, limit {row['limit_us']:.1f} us"


def _layer_sheet(source: Source) -> Sheet:
    controlled = "control" in source.method["arms"]
    columns = ["shape", "dtype", "routing", "M", "stock µs", "tuned µs", "ratio", "95 %", "limit µs", "MB moved"]
    columns += ["error stock", "error tuned", *(["stock/stock"] if controlled else [])]
    figures = len(columns) - 4
    remarks = any(row["status"] != "ok" for row in source.data["rows"])
    if remarks:
        columns.append(REMARKS)
    rows = []
    for row in source.data["rows"]:
        key = row["key"]
        names = [shape_name(key), key["dtype"], key["routing"], str(key["tokens"])]
        if row["status"] != "ok":
            rows.append([*names, row["status"], *[""] * (figures - 1), row["reason"]])
            continue
        median, spread, error = row["median_us"], row["spread_us"], row["relative_error"]
        rows.append(
            [
                *names,
                *(f"{median[arm]:.1f} ± {spread[arm]:.1f}" for arm in engine.ARMS),
                f"{row['ratio']:.3f}",
                _interval(*row["ratio_ci95"]),
                f"{row['limit_us']:.1f}",
                f"{row['bytes'] / 1e6:.1f}",
                *(f"{error[arm]:.1e}" for arm in engine.ARMS),
                *([f"{row['ratio_control']:.3f}"] if controlled else []),
                *([""] if remarks else []),
            ]
        )
    note = (
        "µs: median of all samples ± median absolute deviation; ratio: stock over tuned, above 1 tuned is faster; "
        "limit: at the bandwidth of a large copy, which reading alone can exceed a little."
    )
    return Sheet("One MoE layer", columns, rows, words=3, note=note)


def _layer_summary(source: Source) -> Sheet:
    """A line for each shape, dtype and routing, a column for each M."""
    tokens = sorted({row["key"]["tokens"] for row in source.data["rows"]})
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for row in source.data["rows"]:
        key = row["key"]
        cells = lines.setdefault((shape_name(key), key["dtype"], key["routing"]), {})
        if row["status"] == "ok":
            low, high = row["ratio_ci95"]
            ratio = f"{row['ratio']:.2f}"
            cells[key["tokens"]] = f"{f'**{ratio}**' if low > 1 or high < 1 else ratio} ({row['median_us'][engine.TUNED]:.0f})"
        else:
            cells[key["tokens"]] = row["status"]
    rows = [[*names, *(cells.get(count, "") for count in tokens)] for names, cells in lines.items()]
    note = (
        "Stock time over tuned time (in brackets: tuned, µs a layer) by tokens in the batch (M). "
        "Bold: the 95 % interval excludes 1."
    )
    off = [abs(row["ratio_control"] - 1) for row in source.rows() if "ratio_control" in row]
    if off:
        note += f" Stock against itself: {stats.median(off):.1%} off in the median row, {max(off):.1%} in the worst."
    return Sheet("One MoE layer", ["shape", "dtype", "routing", *(f"M={count}" for count in tokens)], rows, words=3, note=note)


def _sizes(source: Source) -> list[int]:
    """The batch sizes for which a pair is finished."""
    return [size for size in source.method["batch_sizes"] if engine.ratios(source.rows(), size)]


def _size_title(source: Source) -> str:
    return "at once" if source.kind == "serve" else "batch"


def _batch_figure(source: Source, arm: str, size: int, name: str, show: str, factor: float = 1.0) -> str:
    figures = [
        batch[name] * factor
        for row in source.rows()
        if row["key"]["arm"] == arm
        for batch in row["batches"]
        if batch["batch_size"] == size
    ]
    return _spread(figures, show)


def _run_figure(source: Source, arm: str, name: str, show: str, factor: float = 1.0) -> str:
    figures = [row[name] * factor for row in source.rows() if row["key"]["arm"] == arm and row[name] is not None]
    return _spread(figures, show) if figures else "-"


def _spread(figures: Sequence[float], show: str) -> str:
    """The median ± half of the range: a run is one figure, and there are few of them."""
    middle = format(stats.median(figures), show)
    return f"{middle} ± {(max(figures) - min(figures)) / 2:{show}}" if len(figures) > 1 else middle


def _interval(low: float, high: float) -> str:
    return f"{low:.3f}-{high:.3f}" if high < float("inf") else "-"


SPREAD = "±: half of the range over the runs"
RATIO = "ratio: tuned over stock, geometric mean over the pairs with Student's 95 % interval"


def _speed_sheet(source: Source) -> Sheet:
    columns = [_size_title(source), "stock tokens/s", "tuned tokens/s", "ratio", "95 %"]
    rows = []
    for size in _sizes(source):
        ratio, low, high = stats.mean_ratio(engine.ratios(source.rows(), size))
        speeds = [_batch_figure(source, arm, size, "tokens_per_s", ".1f") for arm in engine.ARMS]
        rows.append([str(size), *speeds, f"{ratio:.3f}", _interval(low, high)])
    return Sheet("Output tokens a second", columns, rows, words=0, note=f"{SPREAD}; {RATIO}.")


def _latency_sheet(source: Source) -> Sheet:
    columns = ["stock TPOT ms", "tuned TPOT ms", "stock TTFT ms", "tuned TTFT ms", TOKENS]
    rows = []
    for size in _sizes(source):
        times = [_batch_figure(source, arm, size, name, ".2f", 1e3) for name in ("tpot_s", "ttft_s") for arm in engine.ARMS]
        rows.append([str(size), *times, engine.agreement(source.rows(), size)])
    note = f"TPOT: time per output token, TTFT: time to the first token; {SPREAD}."
    return Sheet("Latency and greedy tokens", [_size_title(source), *columns], rows, words=0, note=note)


def _verdicts(source: Source, arm: str) -> str:
    verdicts = dict.fromkeys(row["plugin"]["verdict"] for row in source.rows() if row["key"]["arm"] == arm)
    return "; ".join(verdicts).removeprefix("tuned: ")


def _together(source: Source) -> bool:
    """Whether two engines shared the GPUs: the second to start finds caches warm, and the memory in use is that of both."""
    return "together" in source.method


def _runs_sheet(source: Source) -> Sheet:
    figures = [("KV cache tokens", "kv_cache_tokens", ".0f", 1.0)]
    if not _together(source):
        figures[:0] = [("start-up s", "startup_s", ".1f", 1.0), ("peak memory GiB", "peak_memory_bytes", ".2f", 1 / GIB)]
    columns = ["arm", "runs", *(title for title, *_ in figures), TUNINGS]
    rows = []
    for arm in engine.ARMS:
        count = sum(row["key"]["arm"] == arm for row in source.rows())
        if count:
            cells = (_run_figure(source, arm, name, show, factor) for _, name, show, factor in figures)
            rows.append([arm, str(count), *cells, "none" if arm == engine.STOCK else _verdicts(source, arm)])
    return Sheet("Engines", columns, rows, words=1, note=f"{SPREAD}.")


def _engine_summary(source: Source) -> Sheet:
    columns = ["stock tokens/s", "tuned tokens/s", "ratio", "95 %", "TPOT ms", "TTFT ms", TOKENS]
    rows = []
    for speed, latency in zip(_speed_sheet(source).rows, _latency_sheet(source).rows, strict=True):
        _, stock_tpot, tuned_tpot, stock_ttft, tuned_ttft, tokens = (cell.partition(" ±")[0] for cell in latency)
        size, *figures = speed
        rows.append([size, *figures, f"{stock_tpot} → {tuned_tpot}", f"{stock_ttft} → {tuned_ttft}", tokens])
    runs = _runs_sheet(source)
    note = f"{SPREAD}; {RATIO}."
    if len(runs.rows) == len(engine.ARMS):
        count = len(engine.ratios(source.rows(), _sizes(source)[0]))
        _, _, *told, (_, _, tunings) = zip(runs.columns, *runs.rows, strict=True)
        both = "; ".join(f"{title}: {stock} stock, {tuned} tuned" for title, stock, tuned in told)
        note += f" Pairs: {count}; {both}. Calls changed by: {tunings}."
    return Sheet("Output tokens a second", [_size_title(source), *columns], rows, words=0, note=note)


# ---- how they look


def rich_table(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for index, column in enumerate(sheet.columns):
        table.add_column(column, justify="left" if is_text(sheet, index) else "right")
    for row in sheet.rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def is_text(sheet: Sheet, index: int) -> bool:
    return index < sheet.words or sheet.columns[index] in (TOKENS, TUNINGS, REMARKS)


def markdown_table(sheet: Sheet) -> str:
    """The table alone."""
    lines = [sheet.columns, ["---" if is_text(sheet, index) else "---:" for index in range(len(sheet.columns))]]
    lines += [[cell.replace("|", "\\|") for cell in row] for row in sheet.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(source: Source) -> str:
    """All of a file."""
    parts = [f"## {source.name}: {subject(source)}", headline(source)]
    for sheet in sheets(source):
        parts += [f"### {sheet.title}", markdown_table(sheet), sheet.note]
    return "\n\n".join(parts) + "\n"


# ---- README


def readme_part(source: Source) -> str:
    """A file's summary. The arguments of its engines are in the file itself, and in all that shows the whole of it."""
    if not (source.rows() if source.kind == "layer" else _sizes(source)):
        raise BenchError(f"{source.name} has nothing finished, which would empty its part of the README; leave it out")
    sheet = summary(source)
    return f"{markdown_table(sheet)}\n\n{workload(source)}; {headline(source)}. {sheet.note}"


def update_readme(text: str, sources: Sequence[Source], links: Callable[[str], str | None]) -> str:
    """The text with the parts of these files made anew; parts of other files stay.

    Args:
        links: the Markdown that shows the plots of a name, None where there are none of it.

    Raises:
        BenchError: a part has no end, a part's file has nothing finished, or there is no part for any of the files.
    """
    named = {source.name: source for source in sources}
    known = 0

    def fresh(match: re.Match[str]) -> str:
        nonlocal known
        if match["what"] == "bench":
            made = readme_part(named[match["name"]]) if match["name"] in named else None
        else:
            made = links(match["name"])
        if made is None:
            return match[0]
        known += 1
        return f"{match['begin']}\n{made}\n{match['end']}"

    for begin in re.finditer(r"<!-- (bench(?:-plots)?:\S+) -->", text):
        if f"<!-- /{begin[1]} -->" not in text[begin.end() :]:
            raise BenchError(f"the README's part {begin[0]} has no end <!-- /{begin[1]} -->")
    part = r"(?P<begin><!-- (?P<what>bench|bench-plots):(?P<name>\S+) -->)\n.*?(?P<end><!-- /(?P=what):(?P=name) -->)"
    text = re.sub(part, fresh, text, flags=re.DOTALL)
    if not known:
        raise BenchError(f"the README has no part for these files, such as <!-- bench:{sources[0].name} -->")
    return text


def plot_links(names: Sequence[tuple[str, str]], folder: pathlib.Path, readme: pathlib.Path) -> str:
    """Pictures in a README, each of which leads to its SVG; ``names`` with what each of them shows."""
    place = pathlib.PurePath(os.path.relpath(folder, readme.parent)).as_posix()
    return "\n".join(f"[![{title}]({place}/{name}.png)]({place}/{name}.svg)" for name, title in names)
