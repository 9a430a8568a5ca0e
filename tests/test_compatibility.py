"""The README's compatibility table is the one that the releases' tests use."""

import compatibility


def test_the_readme_shows_the_table() -> None:
    shown = compatibility.MARKED.search(compatibility.README.read_text())
    assert shown is not None
    assert shown.group() == compatibility.markdown(compatibility.load())


def test_every_release_has_a_row() -> None:
    releases = {row["vllm"].rsplit(".", 1)[0] for row in compatibility.load()}
    assert releases == {f"0.{minor}" for minor in range(14, 34)}


def test_settings_are_those_of_the_readme() -> None:
    from vllm_moe_tune_plugin.settings import HELP

    text = compatibility.README.read_text()
    assert [name for name in HELP if f"| `{name}` |" not in text] == []


def test_every_tuning_is_in_the_readme() -> None:
    from vllm_moe_tune_plugin.tunings import NAMES

    text = compatibility.README.read_text()
    assert [name for name in NAMES if f"| `{name}` |" not in text] == []
