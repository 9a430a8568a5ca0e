"""The environment: every string is read, none raises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_tune_plugin import tunings
from vllm_moe_tune_plugin.settings import HELP, PREFIX, Settings

NAMES = tunings.NAMES
text = st.text()
environs = st.dictionaries(st.sampled_from([*HELP, "HOME", "VLLM_PLUGINS"]) | text.map(PREFIX.__add__) | text, text)


def read(**environ: str) -> Settings:
    return Settings.from_environ(environ, NAMES)


@given(environs)
def test_any_environment_is_read(environ):
    settings = Settings.from_environ(environ, NAMES)
    assert settings.disable <= set(NAMES)
    unknown = {name for name in environ if name.startswith(PREFIX) and name not in HELP}
    assert len(settings.complaints) >= len(unknown)
    for name in unknown:
        assert any(complaint.startswith(f"{name} ") for complaint in settings.complaints)
    if not any(name.startswith(PREFIX) for name in environ):
        assert settings == Settings()
        assert settings.complaints == ()


def test_nothing_set_is_the_default():
    assert read() == Settings()
    assert read().complaints == ()


@given(
    st.lists(st.sampled_from(NAMES) | text.filter(lambda name: "," not in name), max_size=6), st.sampled_from(["", " ", "\t"])
)
def test_disable_takes_names_and_reports_the_others(names, blank):
    settings = read(MOE_TUNE_DISABLE=",".join(f"{blank}{name}{blank}" for name in names))
    stripped = [name.strip() for name in names]
    everything = set(NAMES) if "all" in stripped else set()
    assert settings.disable == everything | (set(stripped) & set(NAMES))
    unknown = [name for name in stripped if name and name not in (*NAMES, "all")]
    assert len(settings.complaints) == len(unknown)
    for name, complaint in zip(unknown, settings.complaints, strict=True):
        assert repr(name) in complaint
        assert all(known in complaint for known in ("all", *NAMES))


def test_disable_all():
    assert read(MOE_TUNE_DISABLE="all").disable == set(NAMES)
    assert read(MOE_TUNE_DISABLE=" all , nonsense").disable == set(NAMES)


def test_disable_of_one_leaves_the_rest():
    assert read(MOE_TUNE_DISABLE="int32_ids,,").disable == {"int32_ids"}
    assert read(MOE_TUNE_DISABLE="int32_ids,,").complaints == ()


@given(text)
def test_log(value):
    settings = read(MOE_TUNE_LOG=value)
    known = value.strip().lower()
    assert settings.log == ("debug" if known == "debug" else "info")
    assert bool(settings.complaints) == (known not in ("", "info", "debug"))


@given(st.sampled_from(["1", "0", "true", "no", "ON", " 1 ", "", "2", "yes!"]) | text)
def test_cutlass_bucket(value):
    settings = read(MOE_TUNE_CUTLASS_BUCKET=value)
    known = value.strip().lower()
    assert settings.cutlass_bucket == (known in ("1", "true", "yes", "on"))
    assert bool(settings.complaints) == (known not in ("1", "true", "yes", "on", "", "0", "false", "no", "off"))


def test_a_misspelt_setting_is_reported_with_those_that_exist():
    (complaint,) = read(MOE_TUNE_DISABEL="all").complaints
    assert complaint.startswith("MOE_TUNE_DISABEL ")
    assert all(name in complaint for name in HELP)


def test_status_dir():
    assert read(MOE_TUNE_STATUS_DIR=" /somewhere ").status_dir == "/somewhere"
