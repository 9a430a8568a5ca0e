"""Fixtures for the tests beside this file; those of the folders below bring their own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Protocol

import fake_stack
import hypothesis
import pytest

from vllm_moe_tune_plugin import tunings

# The machines that run the tests are shared: how long one example takes says nothing.
hypothesis.settings.register_profile("shared", deadline=None)
hypothesis.settings.load_profile("shared")


class Install(Protocol):
    def __call__(self, sources: dict[str, str] | None = None, *, flashinfer: str | None = "0.6.18") -> None: ...


@pytest.fixture
def install(tmp_path, monkeypatch) -> Iterator[Install]:
    """Install a fake stack (:data:`fake_stack.STACK` by default) into this process, once."""
    for name in [name for name in os.environ if name.startswith("MOE_TUNE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(tunings, "NAMES", fake_stack.TUNINGS)
    with fake_stack.new_process(monkeypatch, tmp_path, "vllm", "flashinfer"):
        yield lambda sources=None, *, flashinfer="0.6.18": fake_stack.write(tmp_path, sources or fake_stack.STACK, flashinfer)


@pytest.fixture
def logged(caplog) -> pytest.LogCaptureFixture:
    """What the plugin logs, from INFO on."""
    caplog.set_level(logging.INFO, logger="vllm.moe_tune")
    return caplog
