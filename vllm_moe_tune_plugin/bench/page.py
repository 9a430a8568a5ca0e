"""``bench report --html``: one page that needs nothing else, not even a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from vllm_moe_tune_plugin.bench import plots
from vllm_moe_tune_plugin.bench.plots import Plot
from vllm_moe_tune_plugin.bench.report import Sheet, Source, headline, is_text, sheets, subject

_CSS = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 1.5rem; max-width: 86rem; color: #1a1a1a; background: #fff;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .3rem; padding-top: 1rem; border-top: 1px solid #ccc; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { margin: .3rem 0; }
nav a { margin-right: 1.2rem; }
.where, .note { color: #555; font-size: .87rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e6e6e6; }
th { border-bottom: 2px solid #999; font-weight: 600; }
tbody tr:hover { background: #f3f7fb; }
.text { text-align: left; }
.facts td, .facts th { text-align: left; white-space: normal; vertical-align: top; }
.facts th { border-bottom: 1px solid #e6e6e6; white-space: nowrap; }
figure { margin: 1.2rem 0; max-width: 68rem; }
figure svg { display: block; width: 100%; height: auto; }
figure.one { max-width: 46rem; }
summary { cursor: pointer; font-weight: 600; margin: 1rem 0 .4rem; }
@media print { body { max-width: none; } }
"""

#: Tables of more rows than this are folded, as the plots above them say the same at a glance.
LONG = 40


def page(sources: Sequence[Source]) -> str:
    """The page about these files.

    Raises:
        BenchError: matplotlib is not installed.
    """
    drawn = plots.plots(sources)
    together = [plot for name, group in drawn.items() if name.startswith(plots.ALL) for plot in group]
    parts = ["<h1>What vllm-moe-tune gives</h1>", f'<p class="where">{escape(headline(sources[0]))}</p>' * (len(sources) == 1)]
    if len(sources) > 1:
        links = "".join(f'<a href="#{escape(source.name)}">{escape(source.name)}</a>' for source in sources)
        parts.append(f"<nav>{links}</nav>")
    parts += [f'<p class="note">{escape(line)}</p>' for line in plots.not_compared(sources)]
    parts += map(_figure, together)
    for source in sources:
        parts += _section(source, drawn.get(source.name, []))
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>vllm-moe-tune bench</title>\n<style>{_CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _section(source: Source, drawn: Sequence[Plot]) -> list[str]:
    return [
        f'<section id="{escape(source.name)}">',
        f"<h2>{escape(source.name)}</h2>",
        f'<p>{escape(subject(source))}</p><p class="where">{escape(headline(source))}</p>',
        *map(_figure, drawn),
        *map(_table, sheets(source)),
        _facts("Environment", source.environment),
        _facts("Method", source.method),
        "</section>",
    ]


def _figure(plot: Plot) -> str:
    kind = ' class="one"' if len(plot.panels) == 1 else ""
    return f"<figure{kind}>{plots.inline_svg(plot)}</figure>"


def _table(sheet: Sheet) -> str:
    body = "\n".join(f"<tr>{_cells('td', sheet, row)}</tr>" for row in sheet.rows)
    head = f"<thead><tr>{_cells('th', sheet, sheet.columns)}</tr></thead>"
    table = f'<div class="wide"><table>{head}<tbody>\n{body}\n</tbody></table></div>'
    note = f'<p class="note">{escape(sheet.note)}</p>'
    if len(sheet.rows) > LONG:
        return f"<details><summary>{escape(sheet.title)}: all {len(sheet.rows)} rows</summary>{table}{note}</details>"
    return f"<h3>{escape(sheet.title)}</h3>{table}{note}"


def _cells(tag: str, sheet: Sheet, texts: Sequence[str]) -> str:
    classes = [' class="text"' if is_text(sheet, index) else "" for index in range(len(texts))]
    return "".join(f"<{tag}{kind}>{escape(text)}</{tag}>" for kind, text in zip(classes, texts, strict=True))


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    rows = "\n".join(f"<tr><th>{escape(name)}</th><td>{escape(_shown(value))}</td></tr>" for name, value in facts.items())
    return f'<details open><summary>{title}</summary><table class="facts"><tbody>\n{rows}\n</tbody></table></details>'


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item}" for name, item in value.items()) or "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value)) or "-"
    return str(value) if value != "" else "-"
