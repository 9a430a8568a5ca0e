"""This project's own results: they follow the schema, and the README and its plots are what `bench report` makes of them.

After new results: `vllm-moe-tune bench report tests/gpu/results/*.json --plots tests/gpu/plots --readme README.md`.
"""

import json
import re
from pathlib import Path

import pytest

from vllm_moe_tune_plugin.bench import engine, plots, report, schema, stats
from vllm_moe_tune_plugin.bench.report import Source

ROOT = Path(__file__).parents[2]
README, RESULTS, PLOTS = ROOT / "README.md", ROOT / "tests" / "gpu" / "results", ROOT / "tests" / "gpu" / "plots"


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    """All of them; reading is validating."""
    found = report.load(sorted(RESULTS.glob("*.json")))
    assert found, "there are no results"
    return found


def test_results_are_of_a_gpu(sources: list[Source]) -> None:
    for source in sources:
        environment = source.environment
        for name in ("gpu", "gpu_id", "driver", "vllm", "torch", "triton", "commit"):
            assert environment[name], f"{source.name}: {name}"
        assert not environment["commit"].endswith("-dirty"), source.name
        assert source.rows(), source.name
        assert not [row["key"] for row in source.data["rows"] if row["status"] == "failed"], source.name


def test_no_layer_is_slower_than_stock(sources: list[Source]) -> None:
    slower = [row["key"] for source in sources if source.kind == "layer" for row in source.rows() if row["ratio"] < 0.99]
    assert not slower


def disagreement(*files: Path) -> list[float]:
    """By how much the median ratios of two runs of the layers differ, up to 8 tokens, in all rows that both have."""
    first, second = (
        {tuple(row["key"].values()): row["ratio"] for row in Source(file.stem, schema.read(file)).rows()} for file in files
    )
    both = [key for key in first.keys() & second.keys() if key[-1] <= 8]
    assert len(both) >= 60
    return [max(first[key], second[key]) / min(first[key], second[key]) - 1 for key in both]


def test_two_runs_on_one_gpu_say_the_same(sources: list[Source]) -> None:
    again = RESULTS / "repeat" / "layer-0.33.0.json"
    assert max(disagreement(RESULTS / "layer-0.33.0.json", again)) < 0.004
    (first,) = (source.environment for source in sources if source.name == "layer-0.33.0")
    second = schema.read(again)["environment"]
    assert all(first[name] == second[name] for name in ("gpu_id", "commit"))


def test_gpus_of_two_hosts_differ() -> None:
    """By what the README tells."""
    one, other = sorted((RESULTS / "apart").glob("*.json"))
    assert round(max(disagreement(one, other)), 3) == 0.038


def test_how_much_it_matters_where_scratch_lies() -> None:
    """By what the README tells of the layer runs; a row's samples are of four places, one after the other."""
    differences = []
    for file in (RESULTS / "layer-0.33.0.json", RESULTS / "repeat" / "layer-0.33.0.json"):
        for row in Source(file.stem, schema.read(file)).rows():
            for samples in row["samples_us"].values():
                size = len(samples) // 4
                medians = [stats.median(samples[place * size : (place + 1) * size]) for place in range(4)]
                differences.append(max(medians) / min(medians) - 1)
    assert round(max(differences), 2) == 0.11
    assert 0.15 < sum(difference > 0.01 for difference in differences) / len(differences) < 0.25


def test_where_nothing_of_the_plugin_acts_engines_differ_by_up_to_1_percent(sources: list[Source]) -> None:
    unlike = {}
    for source in sources:
        if source.kind == "engine":
            for size in (size for size in source.method["batch_sizes"] if size >= 16):
                unlike[source.name, size] = abs(stats.mean_ratio(engine.ratios(source.rows(), size))[0] - 1)
    assert len(unlike) >= 10
    assert max(unlike.values()) < 0.0105


def test_cutlass_is_as_fast_with_the_tactic_of_fewer_tokens() -> None:
    """As the README tells."""
    result = json.loads((RESULTS / "cutlass" / "layer-0.33.0.json").read_text())
    rows = {row["tokens"]: row for row in result["rows"]}
    assert rows.keys() == {8192, 12288, 14336, 16384}
    for tokens, row in rows.items():
        assert row["tuned_for"] == {"stock": 8192, "tuned": 8192 if tokens == 8192 else 16384}
        assert abs(row["ratio"] - 1) <= 0.002


def test_readme_is_what_report_makes_of_the_results(sources: list[Source]) -> None:
    text = README.read_text(encoding="utf-8")
    for source in sources:
        assert f"<!-- bench:{source.name} -->" in text
    known = {source.name for source in sources}
    assert set(re.findall(r"<!-- bench:(\S+) -->", text)) == known
    drawn = plots.plots(sources)

    def links(name: str) -> str:
        return report.plot_links([(plot.name, plot.title) for plot in drawn[name]], PLOTS, README)

    assert report.update_readme(text, sources, links) == text


def test_plots_are_those_of_the_results(sources: list[Source]) -> None:
    for group in plots.plots(sources).values():
        for plot in group:
            assert plot.digest().encode() in (PLOTS / f"{plot.name}.png").read_bytes(), plot.name
            assert plot.digest() in (PLOTS / f"{plot.name}.svg").read_text(), plot.name
