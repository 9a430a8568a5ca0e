"""`bench report`: its tables, its parts of a README, its plots and its page."""

import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import synthetic
from click.testing import CliRunner, Result

from vllm_moe_tune_plugin.bench import plots, report, schema
from vllm_moe_tune_plugin.bench.cli import bench
from vllm_moe_tune_plugin.bench.report import Source
from vllm_moe_tune_plugin.bench.shapes import SHAPES, Shape

TWO = (SHAPES["qwen3-30b-a3b"], SHAPES["gpt-oss-20b"])
PARTS = """# Title

<!-- bench:engine-a -->
old
<!-- /bench:engine-a -->
between
<!-- bench-plots:all-engine -->
<!-- /bench-plots:all-engine -->
<!-- bench:another -->
stays
<!-- /bench:another -->
"""


def layer_results(shapes: Sequence[Shape] = TWO, **options: Any) -> dict[str, Any]:
    return synthetic.layer_results(shapes, **({"tokens": (1, 8), "rounds": 4} | options))


def exact_engine(gain: float = 0.25, **options: Any) -> dict[str, Any]:
    """Without noise, so that what a table says of it can be told in advance."""
    data = synthetic.engine_results(**({"batch_sizes": (1, 8), "gain": gain, "noise": 0.0} | options))
    for row in data["rows"]:
        row |= {"startup_s": 60.0 + row["key"]["pair"], "peak_memory_bytes": 128 * 2**30}
    return data


def write(folder: Path, **files: dict[str, Any]) -> list[str]:
    paths = [folder / f"{name.replace('_', '-')}.json" for name in files]
    for path, data in zip(paths, files.values(), strict=True):
        path.write_text(schema.dump(data))
    return list(map(str, paths))


def run(*arguments: str, exit_code: int = 0) -> Result:
    done = CliRunner().invoke(bench, ["report", *arguments])
    assert done.exit_code == exit_code, done.output
    return done


# ---- tables


def test_markdown_of_an_engine(tmp_path: Path) -> None:
    output = run("--markdown", *write(tmp_path, engine_a=exact_engine())).output

    assert (
        """\
## engine-a: qwen3-30b-a3b, 32 tokens in, 256 out

NVIDIA H200, driver 570.1; vLLM 0.19.1, torch 2.10.0, Triton 3.6.0, FlashInfer 0.6.6; plugin 0.1.0 at abcdef012345; 2030-01-02

### Output tokens a second

| batch | stock tokens/s | tuned tokens/s | ratio | 95 % |
| ---: | ---: | ---: | ---: | ---: |
| 1 | 210.0 ± 0.0 | 262.5 ± 0.0 | 1.250 | 1.250-1.250 |
| 8 | 1108.4 ± 0.0 | 1256.9 ± 0.0 | 1.134 | 1.134-1.134 |
"""
        in output
    )
    assert (
        "| 8 | 7.22 ± 0.00 | 6.36 ± 0.00 | 20.00 ± 0.00 | 20.00 ± 0.00 | part in 1 of 8, first at token 40 (margin 0.025) |"
        in output
    )
    assert "| tuned | 3 | 61.0 ± 1.0 | 128.00 ± 0.00 | 812000 ± 0 | low_latency_assignment |" in output


def test_a_pair_alone_has_no_interval(tmp_path: Path) -> None:
    output = run("--markdown", *write(tmp_path, serve=exact_engine(pairs=1, kind="serve"))).output
    assert "| at once | stock tokens/s | tuned tokens/s | ratio | 95 % |" in output
    assert "| 1 | 210.0 | 262.5 | 1.250 | - |" in output


def test_engine_without_a_kv_cache_size(tmp_path: Path) -> None:
    data = exact_engine()
    for row in data["rows"]:
        row["kv_cache_tokens"] = None
    assert "| stock | 3 | 61.0 ± 1.0 | 128.00 ± 0.00 | - | none |" in run("--markdown", *write(tmp_path, engine_a=data)).output


def test_engines_that_share_the_gpu_tell_no_start_and_no_memory(tmp_path: Path) -> None:
    """The second finds warm caches, and the memory is that of both. What is in its KV cache is an engine's own."""
    data = exact_engine(together=True)
    (path,) = write(tmp_path, engine_a=data)
    note = report.summary(Source("engine-a", data)).note
    assert "Pairs: 3; KV cache tokens: 812000 ± 0 stock, 812000 ± 0 tuned. Calls changed by: low_latency_assignment." in note
    markdown = run("--markdown", path).output
    assert "| tuned | 3 | 812000 ± 0 | low_latency_assignment |" in markdown
    for text in (note, markdown, run(path).output):
        assert "KV cache" in text
        assert not re.search("start-up|peak memory", text, re.IGNORECASE)


def test_terminal_shows_every_row_of_a_layer(tmp_path: Path) -> None:
    data = layer_results(dtypes=("bf16", "fp8-block"), control=True)
    data["rows"][0] = {name: data["rows"][0][name] for name in ("key", "problem")} | {
        "status": "oom",
        "reason": "no [b]memory[/b]",
    }
    lines = run(*write(tmp_path, layer=data)).output.splitlines()

    (gone,) = [line for line in lines if "oom" in line]
    assert re.fullmatch(r"qwen3-30b-a3b +bf16 +uniform +1 +oom +no \[b\]memory\[/b\] *", gone)
    table = [line.split() for line in lines if line.startswith(("qwen3", "gpt-oss"))]
    assert [tuple(cells[:4]) for cells in table] == [
        (row["key"]["shape"], row["key"]["dtype"], row["key"]["routing"], str(row["key"]["tokens"])) for row in data["rows"]
    ]
    row, cells = data["rows"][1], table[1]
    assert cells[4] == f"{row['median_us']['stock']:.1f}"
    assert f"{row['ratio']:.3f}" in cells
    assert f"{row['ratio_control']:.3f}" in cells
    assert sum(cells[4] == "unsupported" for cells in table) == 4  # gpt-oss in fp8-block


@pytest.mark.parametrize("options", [{}, {"control": True}, {"shapes": TWO[:1]}])
def test_every_row_of_a_layer_has_a_cell_for_each_column(options: dict[str, Any]) -> None:
    (sheet,) = report.sheets(Source("layer", layer_results(**options)))
    assert {len(row) for row in sheet.rows} == {len(sheet.columns)}


def test_summary_of_a_layer_has_a_column_for_each_m() -> None:
    data = layer_results(shapes=TWO[:1], dtypes=("bf16",), routings=("uniform",), tokens=(8, 1))
    slow, fast = data["rows"]
    slow |= {"ratio": 1.004, "ratio_ci95": [0.998, 1.01]}
    fast |= {"ratio": 1.2, "ratio_ci95": [1.19, 1.21]}
    sheet = report.summary(Source("layer", data))

    assert list(sheet.columns) == ["shape", "dtype", "routing", "M=1", "M=8"]
    first, second = (f"{row['median_us']['tuned']:.0f}" for row in (fast, slow))
    assert sheet.rows == [["qwen3-30b-a3b", "bf16", "uniform", f"**1.20** ({first})", f"1.00 ({second})"]]


# ---- README


def test_readme_parts_are_made_anew(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(PARTS)
    data = exact_engine()
    data["method"]["engine_args"] = ["--max-model-len", "4096"]
    files = write(tmp_path, engine_a=data)
    run("--readme", str(readme), *files)
    text = readme.read_text()

    part = text[text.index("<!-- bench:engine-a -->") : text.index("<!-- /bench:engine-a -->")]
    assert "| 1 | 210.0 ± 0.0 | 262.5 ± 0.0 | 1.250 | 1.250-1.250 | 4.76 → 3.81 | 13.00 → 13.00 | same |" in part
    assert "Pairs: 3; start-up s: 61.0 ± 1.0 stock, 61.0 ± 1.0 tuned; peak memory GiB: 128.00 ± 0.00 stock" in part
    assert "qwen3-30b-a3b, 32 tokens in, 256 out; NVIDIA H200" in part  # its arguments are shown where all of it is
    assert "## engine-a: qwen3-30b-a3b, 32 tokens in, 256 out, --max-model-len 4096" in run("--markdown", *files).output
    assert "old" not in text
    assert text.replace(part, "") == PARTS.replace("<!-- bench:engine-a -->\nold\n", "")
    run("--readme", str(readme), *files)
    assert readme.read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "the README has no part for these files, such as <!-- bench:engine-a -->"),
        ("<!-- bench:engine-a -->\nopen", "<!-- bench:engine-a --> has no end <!-- /bench:engine-a -->"),
    ],
)
def test_readme_without_a_part(tmp_path: Path, text: str, message: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert message in run("--readme", str(readme), *write(tmp_path, engine_a=exact_engine()), exit_code=2).output
    assert readme.read_text() == text


def test_readme_keeps_its_table_where_nothing_is_finished(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(PARTS)
    whole, no_pair, empty = exact_engine(), exact_engine(), exact_engine()
    no_pair["rows"] = [row for row in no_pair["rows"] if (row["key"]["pair"] == 0) == (row["key"]["arm"] == "stock")]
    empty["rows"] = []
    for data in (no_pair, empty):
        output = run("--readme", str(readme), *write(tmp_path, engine_a=data, engine_b=whole), exit_code=2).output
        assert output == "Error: engine-a has nothing finished, which would empty its part of the README; leave it out\n"
        assert readme.read_text() == PARTS
    run("--readme", str(readme), *write(tmp_path, engine_a=whole, engine_b=empty))  # of which the README shows nothing


# ---- several files


@pytest.mark.parametrize("name", ["gpu", "gpu_id", "driver"])
@pytest.mark.parametrize("option", ["--plots", "--html"])
def test_files_of_different_machines_are_not_compared(tmp_path: Path, option: str, name: str) -> None:
    """Each has its own plots, and a line says why there is none of both."""
    pytest.importorskip("matplotlib")
    files = write(tmp_path, one=exact_engine(), two=exact_engine(vllm="0.33.0", **{name: "another"}))
    out = tmp_path / "out"
    line, _ = run(option, str(out), *files).output.splitlines()
    assert re.fullmatch(rf"no plot compares the engine files: one and two are of different machines \({name}: .*\)", line)
    if option == "--plots":
        assert {path.stem for path in out.iterdir()} == {"one-gain", "two-gain"}
    else:
        assert out.read_text(encoding="utf-8").count("<svg") == 2
        assert "no plot compares the engine files" in out.read_text(encoding="utf-8")
    tables = run("--markdown", *files).output  # tables stand apart
    assert tables.count("### Output tokens a second") == 2
    assert "no plot" not in tables


def test_files_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    files = write(tmp_path, one=exact_engine()) + write(tmp_path / "more", one=exact_engine())
    assert "two files are named one" in run(*files, exit_code=2).output


def test_plots_of_several_files() -> None:
    environments = {"engine-a": {}, "engine-b": {"vllm": "0.33.0"}}
    sources = [Source(name, exact_engine(vllm=more.get("vllm", "0.19.1"))) for name, more in environments.items()]
    (gain,) = plots.plots(sources)["all-engine"]
    (panel,) = gain.panels
    assert [line.label for line in panel.lines] == ["vLLM 0.19.1", "vLLM 0.33.0"]
    assert panel.lines[0].x == (1, 8)
    assert panel.lines[0].y == pytest.approx((25.0, 25 / 8**0.3), abs=1e-3)

    layers = [Source("one", layer_results()), Source("two", layer_results(rounds=6))]
    found = {plot.name: plot for plot in plots.plots(layers)["all-layer"]}
    assert set(found) == {
        f"all-layer-ratio-{dtype}-{routing}" for dtype in ("bf16", "fp8-block") for routing in ("uniform", "skewed")
    }
    shapes = [panel.title for panel in found["all-layer-ratio-bf16-skewed"].panels]
    assert shapes == ["qwen3-30b-a3b", "gpt-oss-20b"]
    for panel in found["all-layer-ratio-bf16-skewed"].panels:
        assert [line.label for line in panel.lines] == ["one", "two"]  # the same versions: by name


def test_plots_of_a_layer_show_its_figures() -> None:
    data = layer_results(tokens=(8, 1))
    made = {plot.name: plot for plot in plots.plots([Source("layer", data)])["layer"]}
    assert set(made) == {
        "layer-ratio",
        *(f"layer-latency-{dtype}-{routing}" for dtype in ("bf16", "fp8-block") for routing in ("uniform", "skewed")),
    }

    (panel,) = made["layer-latency-fp8-block-skewed"].panels  # gpt-oss has no such rows
    rows = [row for row in data["rows"] if row["key"]["dtype"] == "fp8-block" and row["key"]["routing"] == "skewed"]
    eight, one = (row for row in rows if row["status"] == "ok")
    stock, tuned, limit = panel.lines
    assert stock.x == tuned.x == limit.x == (1, 8)
    assert stock.y == (one["median_us"]["stock"], eight["median_us"]["stock"])
    assert tuned.y == (one["median_us"]["tuned"], eight["median_us"]["tuned"])
    assert limit.y == (one["limit_us"], eight["limit_us"])
    assert [line.label for line in panel.lines] == ["stock", "tuned", "at copy bandwidth"]

    qwen, oss = made["layer-ratio"].panels
    assert [line.label for line in qwen.lines] == ["bf16, uniform", "bf16, skewed", "fp8-block, uniform", "fp8-block, skewed"]
    assert [line.label for line in oss.lines] == ["bf16, uniform", "bf16, skewed"]
    assert len({line.look for line in qwen.lines}) == 4


def test_a_file_without_finished_rows_has_no_plots() -> None:
    empty = exact_engine() | {"rows": []}
    assert plots.plots([Source("engine", empty)]) == {}
    assert report.summary(Source("engine", empty)).rows == []


# ---- pictures


@pytest.mark.parametrize("option", ["--plots", "--html"])
def test_what_cannot_be_written_is_one_line(tmp_path: Path, option: str) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    target = str(tmp_path / "file" / "out")
    output = run(option, target, *write(tmp_path, engine_a=exact_engine()), exit_code=1).output
    assert output == f"Error: {target} cannot be written: Not a directory\n"


def test_plots_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files = write(tmp_path, engine_a=exact_engine())
    for option in ("--plots", "--html"):
        output = run(option, str(tmp_path / "out"), *files, exit_code=2).output
        assert output == "Error: plots need matplotlib: pip install 'vllm-moe-tune-plugin[plot]'\n"
    assert not (tmp_path / "out").is_file()


def test_plots_and_their_links(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readme, folder = tmp_path / "README.md", tmp_path / "docs" / "bench"
    readme.write_text(PARTS)
    files = write(tmp_path, engine_a=exact_engine(), engine_b=exact_engine(vllm="0.33.0"), layer=layer_results(TWO[:1]))
    run("--plots", str(folder), "--readme", str(readme), *files)

    sources = report.load([Path(file) for file in files])
    made = {plot.name: plot for group in plots.plots(sources).values() for plot in group}
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in made for kind in ("png", "svg")}
    for name, plot in made.items():
        assert plot.digest().encode() in (folder / f"{name}.png").read_bytes()
        assert plot.digest() in (folder / f"{name}.svg").read_text()
    link = (
        "[![Engine gain: qwen3-30b-a3b, 32 tokens in, 256 out](docs/bench/all-engine-gain.png)](docs/bench/all-engine-gain.svg)"
    )
    assert f"<!-- bench-plots:all-engine -->\n{link}\n<!-- /bench-plots:all-engine -->" in readme.read_text()

    before = {path: path.read_bytes() for path in folder.iterdir()}
    run("--plots", str(folder), *files)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before  # nothing to commit where nothing changed


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_a_gain_shows_its_pairs(pairs: int) -> None:
    """Also where there are too few of them for an interval."""
    pytest.importorskip("matplotlib")
    (gain,) = plots.plots([Source("engine", exact_engine(pairs=pairs))])["engine"]
    assert "dots: one pair of runs each" in gain.subtitle
    (axes,) = plots._draw(gain).axes
    (dots,) = [marks for marks in axes.collections if type(marks).__name__ == "PathCollection"]
    assert len(dots.get_offsets()) == 2 * pairs  # two batch sizes


def test_digest_tells_other_results_apart() -> None:
    digests = {plots.plots([Source("engine", exact_engine(gain))])["engine"][0].digest() for gain in (0.1, 0.2, 0.2)}
    assert len(digests) == 2


class Page(HTMLParser):
    """What a page loads, links to and is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href", "data", "action", "srcset"):
                self.references.append(str(value))
            self.references += re.findall(r"url\((.*?)\)", str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_needs_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "page.html"
    layer = layer_results(settings={"VLLM_X": "<b>&"})
    files = write(tmp_path, engine_a=exact_engine(), engine_b=exact_engine(vllm="0.33.0"), layer=layer)
    run("--html", str(path), *files)
    text = path.read_text(encoding="utf-8")
    page = Page(text)

    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert page.references
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert not re.search(r"@import|https?://|file:|//\w", text)
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("svg") == 1 + 2 + 5
    assert "VLLM_X=&lt;b&gt;&amp;" in text
    for data in (exact_engine(), layer):
        assert data["method"]["what"].replace("'", "&#x27;") in text
