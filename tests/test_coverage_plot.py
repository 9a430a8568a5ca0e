"""The picture of `vllm-moe-tune coverage --plot`; what it shows is measured in tests/autotune."""

from pathlib import Path
from typing import Any

import pytest

from vllm_moe_tune_plugin import coverage_cli
from vllm_moe_tune_plugin.coverage import Coverage, KernelCoverage, Serving, Side, Span


def test_plain_numbers_from_one_token_on_and_a_legend_of_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[Any] = []
    monkeypatch.setattr(figure, "savefig", lambda self, target: drawn.append((self, self.draw_without_rendering())))
    stock = Side(8192, (1, 8192), (Span(1, 1, 1, "tuned"), Span(2, 8192, 8192, "tuned"), Span(8193, 32768, 8192, "beyond")))
    plugin = Side(32768, (1, 8192, 32768), (Span(1, 8192, 8192, "tuned"), Span(8193, 32768, 32768, "tuned")))
    kernel = KernelCoverage("kernel", "module:caller", 32768, stock, plugin, (32768,), 0, False, ())
    coverage_cli.draw(Coverage(Serving(8192), "0", "0", (kernel,)), tmp_path / "plot.png")

    ((picture, _),) = drawn
    (legend,) = picture.legends
    assert [text.get_text() for text in legend.get_texts()] == [coverage_cli._MEANING[name] for name in ("tuned", "beyond")]
    for axes in picture.axes:
        assert axes.get_xlim()[0] == 1
        labels = [tick.get_text() for scale in (axes.xaxis, axes.yaxis) for tick in scale.get_ticklabels()]
        assert all(label.isdecimal() for label in labels)
