"""Each patch's state on the installed stack, seen through vLLM's own loader, equals the committed table."""

from __future__ import annotations

import importlib.util
import pathlib

import compatibility
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs stock vLLM", allow_module_level=True)


def test_states_are_those_of_the_table() -> None:
    seen = compatibility.observe()
    rows = [row for row in compatibility.load() if (row["vllm"], row["flashinfer"]) == (seen["vllm"], seen["flashinfer"])]
    assert rows == [seen]


def test_every_call_of_flashinfer_is_known() -> None:
    """A call site in a module that autotune_bucket does not look at would be judged by its siblings."""
    from vllm_moe_tune_plugin.stack import functions_in, names_in
    from vllm_moe_tune_plugin.tunings import autotune_bucket

    root = pathlib.Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    spellings = {spelling for kernel in autotune_bucket.KERNELS for spelling in (kernel, f"flashinfer_{kernel}")}
    callers = set()
    for path in root.rglob("*.py"):
        text = path.read_text(errors="replace")
        if not any(spelling in text for spelling in spellings):
            continue
        module = ".".join(["vllm", *path.relative_to(root).with_suffix("").parts])
        for _, function in functions_in(compile(text, str(path), "exec")):
            if names_in(function) & spellings:
                callers.add(module)
    # These only ask whether the kernels exist.
    assert callers - set(autotune_bucket.CALLERS) <= {"vllm.utils.flashinfer"}
