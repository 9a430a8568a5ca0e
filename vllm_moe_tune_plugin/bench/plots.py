"""The plots of ``bench report``: what each shows is plain data, which matplotlib (the extra ``plot``) then draws.

A plot's data has a digest, which its files carry: whether a picture is that of some results can be told without drawing it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import io
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_moe_tune_plugin.bench import engine, stats
from vllm_moe_tune_plugin.bench.report import Source, machines_differ, shape_name, workload
from vllm_moe_tune_plugin.bench.schema import BenchError

#: Plots of several files go by this before their kind: no file's stem begins so.
ALL = "all-"

#: Okabe and Ito's colours, which stay apart for the colour-blind; markers and dashes say the same once more.
BLUE, ORANGE, GREEN, PURPLE, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#56B4E9", "#555555"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", ":", "-.")
DPI = 150
#: Inches above the panels for the title and the line below it.
HEAD = 0.56


@dataclass(frozen=True)
class Line:
    """One line of a panel.

    Attributes:
        low, high: the interval of each point, none where there is none.
        dots: single measurements behind each point.
        look: numbers of its colour (with its marker) and its dashes.
    """

    label: str
    x: tuple[int, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    dots: tuple[tuple[float, ...], ...] = ()
    look: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Panel:
    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Plot:
    """One picture. ``quantity``: ``latency`` (with the time at copy bandwidth as last line), ``ratio`` or ``gain``."""

    name: str
    quantity: str
    title: str
    subtitle: str
    x_label: str
    y_label: str
    panels: tuple[Panel, ...]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()[:16]


# ---- what they show


def plots(sources: Sequence[Source]) -> dict[str, list[Plot]]:
    """The plots of each file by its name, and those of several files of a kind and of one machine by ``all-`` and the kind."""
    found = {source.name: _layer_plots(source) if source.kind == "layer" else [_gain([source])] for source in sources}
    for kind, several in _by_kind(sources).items():
        if len(several) > 1 and machines_differ(several) is None:
            found[ALL + kind] = _layer_ratios(several) if kind == "layer" else [_gain(several)]
    # A file without finished rows has nothing to show.
    drawable = {name: [plot for plot in group if plot.panels] for name, group in found.items()}
    return {name: group for name, group in drawable.items() if group}


def not_compared(sources: Sequence[Source]) -> list[str]:
    """A line for each kind whose files get no plot in common: why."""
    reasons = {kind: machines_differ(several) for kind, several in _by_kind(sources).items()}
    return [f"no plot compares the {kind} files: {reason}" for kind, reason in reasons.items() if reason is not None]


def _by_kind(sources: Sequence[Source]) -> dict[str, list[Source]]:
    return {kind: [one for one in sources if one.kind == kind] for kind in dict.fromkeys(source.kind for source in sources)}


def _where(sources: Sequence[Source]) -> str:
    environment = sources[0].environment
    vllm = {source.environment["vllm"] for source in sources}
    return environment["gpu"] or "no GPU" if len(vllm) > 1 else f"{environment['gpu'] or 'no GPU'}, vLLM {vllm.pop()}"


def _distinct(sources: Sequence[Source]) -> list[str]:
    """What to call each of several files: by vLLM's version if that alone tells them apart."""
    versions = [f"vLLM {source.environment['vllm']}" for source in sources]
    models = {source.method.get("model") for source in sources}
    return versions if len(set(versions)) == len(versions) and len(models) == 1 else [source.name for source in sources]


def _groups(rows: Sequence[Mapping[str, Any]], *names: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Rows by the values that their keys have for ``names``, each group in order of M."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row["key"][name] for name in names), []).append(row)
    return {values: sorted(group, key=lambda row: int(row["key"]["tokens"])) for values, group in groups.items()}


def _tokens(rows: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    return tuple(row["key"]["tokens"] for row in rows)


def _layer_plots(source: Source) -> list[Plot]:
    rows = source.rows()
    found = []
    for (dtype, routing), some in _groups(rows, "dtype", "routing").items():
        panels = [
            Panel(
                shape_name(group[0]["key"]),
                (
                    _latency("stock", group, engine.STOCK, (1, 0)),
                    _latency("tuned", group, engine.TUNED, (0, 0)),
                    Line("at copy bandwidth", _tokens(group), tuple(row["limit_us"] for row in group)),
                ),
            )
            for group in _groups(some, "shape", "ep").values()
        ]
        found.append(
            Plot(
                f"{source.name}-latency-{dtype}-{routing}",
                "latency",
                f"Latency of one MoE layer: {dtype}, {routing} routing",
                _where([source]),
                "tokens in the batch (M)",
                "µs a layer",
                tuple(panels),
            )
        )
    looks = sorted({(row["key"]["dtype"], row["key"]["routing"]) for row in rows})
    dtypes, routings = (sorted({look[index] for look in looks}, reverse=index == 1) for index in (0, 1))
    panels = [
        Panel(
            shape_name(group[0]["key"]),
            tuple(
                _ratio(f"{dtype}, {routing}", some, (dtypes.index(dtype), routings.index(routing)))
                for (dtype, routing), some in _groups(group, "dtype", "routing").items()
            ),
        )
        for group in _groups(rows, "shape", "ep").values()
    ]
    return [*found, _ratio_plot(f"{source.name}-ratio", "", [source], panels)]


def _layer_ratios(sources: Sequence[Source]) -> list[Plot]:
    """The ratios of several files, a picture for each dtype and routing."""
    by_look = [_groups(source.rows(), "dtype", "routing") for source in sources]
    found = []
    for dtype, routing in dict.fromkeys(look for looks in by_look for look in looks):
        parts = [_groups(looks.get((dtype, routing), []), "shape", "ep") for looks in by_look]
        panels = []
        for shape in dict.fromkeys(shape for part in parts for shape in part):
            lines = [
                _ratio(label, part[shape], (index, index))
                for index, (label, part) in enumerate(zip(_distinct(sources), parts, strict=True))
                if shape in part
            ]
            panels.append(Panel(shape_name(dict(zip(("shape", "ep"), shape, strict=True))), tuple(lines)))
        found.append(_ratio_plot(f"{ALL}layer-ratio-{dtype}-{routing}", f": {dtype}, {routing} routing", sources, panels))
    return found


def _ratio_plot(name: str, what: str, sources: Sequence[Source], panels: Sequence[Panel]) -> Plot:
    return Plot(
        name,
        "ratio",
        f"Speed-up of one MoE layer{what}",
        f"{_where(sources)}; bands: 95 % intervals",
        "tokens in the batch (M)",
        "stock time / tuned time",
        tuple(panels),
    )


def _latency(label: str, rows: Sequence[Mapping[str, Any]], arm: str, look: tuple[int, int]) -> Line:
    return Line(label, _tokens(rows), tuple(row["median_us"][arm] for row in rows), look=look)


def _ratio(label: str, rows: Sequence[Mapping[str, Any]], look: tuple[int, int]) -> Line:
    low, high = (tuple(row["ratio_ci95"][end] for row in rows) for end in (0, 1))
    return Line(label, _tokens(rows), tuple(row["ratio"] for row in rows), low, high, look=look)


def _gain(sources: Sequence[Source]) -> Plot:
    lines = []
    for index, (label, source) in enumerate(zip(_distinct(sources), sources, strict=True)):
        by_size = {size: engine.ratios(source.rows(), size) for size in sorted(source.method["batch_sizes"])}
        pairs = {size: ratios for size, ratios in by_size.items() if ratios}
        if not pairs:
            continue
        y, low, high = zip(*([_percent(value) for value in stats.mean_ratio(ratios)] for ratios in pairs.values()), strict=True)
        dots = tuple(tuple(map(_percent, ratios)) for ratios in pairs.values())
        # One pair has no interval; that of two would dwarf everything else in the picture.
        ends = (low, high) if all(len(ratios) > 2 for ratios in pairs.values()) else ((), ())
        lines.append(Line(label, tuple(pairs), y, *ends, dots, look=(index, index)))
    kind, several = sources[0].kind, len(sources) > 1
    subjects = dict.fromkeys(map(workload, sources))
    what = next(iter(subjects)) if len(subjects) == 1 else "several models or settings"
    parts = ["dots: one pair of runs each"] + ["bars: 95 % intervals"] * all(line.low for line in lines)
    return Plot(
        f"{ALL}{kind}-gain" if several else f"{sources[0].name}-gain",
        "gain",
        f"Engine gain: {what}",
        "; ".join([_where(sources), *parts]),
        "requests at once" if kind == "serve" else "batch size",
        "gain in output tokens a second (%)",
        (Panel("", tuple(lines)),) if lines else (),
    )


def _percent(ratio: float) -> float:
    return round(100 * (ratio - 1), 3)


# ---- how they look


def save(plot: Plot, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write a plot's PNG and SVG.

    Raises:
        BenchError: matplotlib is not installed.
    """
    figure = _draw(plot)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{plot.name}.png", folder / f"{plot.name}.svg"]
    figure.savefig(paths[0], dpi=DPI, metadata={"Description": plot.digest(), "Software": None})
    paths[1].write_text(_svg(plot, figure))
    return paths


def inline_svg(plot: Plot) -> str:
    """A plot as an element of an HTML page, which fits its width and shares no id with another plot.

    Raises:
        BenchError: matplotlib is not installed.
    """
    text = _svg(plot, _draw(plot))
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r' (xmlns(:\w+)?|width|height|version)="[^"]*"', "", text[: text.index(">")]) + text[text.index(">") :]
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{plot.name}-", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{plot.title}"', 1)


def _svg(plot: Plot, figure: Any) -> str:
    text = io.StringIO()
    matplotlib = _matplotlib()
    with matplotlib.rc_context({"svg.hashsalt": plot.name}):
        figure.savefig(text, format="svg", metadata={"Description": plot.digest(), "Date": None, "Creator": None})
    return re.sub(r"[ \t]+$", "", text.getvalue(), flags=re.MULTILINE)


def _matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib")
    except ImportError:
        raise BenchError("plots need matplotlib: pip install 'vllm-moe-tune-plugin[plot]'") from None


_STYLE: Mapping[str, Any] = {
    "font.family": "DejaVu Sans",  # matplotlib brings it, so the pictures are the same everywhere
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 9.5,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "svg.fonttype": "path",
}


def _draw(plot: Plot) -> Any:
    matplotlib = _matplotlib()
    figures = importlib.import_module("matplotlib.figure")
    count = len(plot.panels)
    columns = min(count, 3)
    rows = -(-count // columns)
    with matplotlib.rc_context(_STYLE):
        width, height = (7.2, 4.4) if count == 1 else (3.3 * columns + 0.4, 2.3 * rows + 1.3)
        figure = figures.Figure(figsize=(width, height), layout="constrained", facecolor="white")
        # Latencies of different shapes differ by more than what is to be seen; ratios share one axis.
        grid = figure.subplots(rows, columns, squeeze=False, sharey=plot.quantity == "ratio")
        flat = list(grid.flat)
        for index, (axes, panel) in enumerate(zip(flat, plot.panels, strict=False)):
            _draw_panel(plot, axes, panel, index)
            axes.set_xlabel(plot.x_label if index + columns >= count else "")
            axes.set_ylabel(plot.y_label if index % columns == 0 else "")
            if plot.quantity == "ratio":
                axes.tick_params(labelleft=True)
        for axes in flat[count:]:
            axes.remove()
        handles = {line.get_label(): line for axes in flat[:count] for line in axes.lines if line.get_label()[0] != "_"}
        figure.get_layout_engine().set(rect=(0, 0, 1, 1 - HEAD / height))
        figure.text(0.01, 1 - 0.08 / height, plot.title, fontsize=11.5, fontweight="bold", va="top")
        figure.text(0.01, 1 - 0.32 / height, plot.subtitle, fontsize=8.5, color=GREY, va="top")
        if len(handles) > 1 or plot.quantity != "gain":
            figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 4))
    return figure


def _draw_panel(plot: Plot, axes: Any, panel: Panel, index: int) -> None:
    ticker = importlib.import_module("matplotlib.ticker")
    values = sorted({x for line in panel.lines for x in line.x})
    axes.set_xscale("log", base=2)
    axes.set_title(panel.title, loc="left")
    for number, line in enumerate(panel.lines):
        colour, dashes = COLOURS[line.look[0] % len(COLOURS)], DASHES[line.look[1] % len(DASHES)]
        marker = MARKERS[line.look[0] % len(MARKERS)]
        if plot.quantity == "latency" and number == len(panel.lines) - 1:
            axes.plot(line.x, line.y, color=GREY, linestyle="--", linewidth=1.2, label=line.label, zorder=1)
        elif plot.quantity == "gain":
            # Beside each other, so that no interval hides another.
            x = [value * 2 ** (0.1 * (number - (len(panel.lines) - 1) / 2)) for value in line.x]
            axes.plot(x, line.y, color=colour, marker=marker, linestyle=dashes, label=line.label)
            if line.low:
                bars = [[y - end for y, end in zip(line.y, line.low, strict=True)]]
                bars.append([end - y for y, end in zip(line.y, line.high, strict=True)])
                axes.errorbar(x, line.y, bars, color=colour, fmt="none", capsize=3, elinewidth=1, label="_")
            spots = [(at, dot) for at, dots in zip(x, line.dots, strict=True) for dot in dots]
            axes.scatter(*zip(*spots, strict=True), s=9, color=colour, alpha=0.45, linewidths=0, label="_")
        else:
            axes.plot(line.x, line.y, color=colour, marker=marker, linestyle=dashes, label=line.label)
            if line.low:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0, label="_")
    axes.xaxis.set_major_locator(ticker.FixedLocator(values))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    if plot.quantity == "latency":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.axhline(1 if plot.quantity == "ratio" else 0, color="#222222", linewidth=1, zorder=1, label="_")
