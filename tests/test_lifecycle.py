"""The four tunings in one process: states, settings, what is logged, and that nothing is left behind."""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from typing import Any

import fake_stack
import pytest
import torch
import wrapt
from fake_stack import EXPERTS, FUSED_MOE, TUNINGS

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin import plugin
from vllm_moe_tune_plugin.ledger import State
from vllm_moe_tune_plugin.tunings import int32_ids, tuple_routing

APPLIED = dict.fromkeys(TUNINGS, "applied")
IDS, WEIGHTS = torch.tensor([[1, 2]]), torch.tensor([[0.7, 0.3]])


def namespaces() -> dict[str, Any]:
    """Every object in every module and class of both packages."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("vllm", "flashinfer"):
            continue
        for key, value in list(vars(module).items()):
            if not key.startswith("__"):
                found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__.partition(".")[0] in ("vllm", "flashinfer"):
                found.update(
                    (f"{name}.{key}.{attribute}", member) for attribute, member in vars(value).items() if attribute[:2] != "__"
                )
    return found


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []


def wrapped(found: dict[str, Any]) -> set[str]:
    return {key for key, value in found.items() if fake_stack.is_wrapper(value)}


# --- nothing is left behind ------------------------------------------------------------------------------------------------


def test_every_object_is_the_same_after_unregister(install):
    install()
    fake_stack.load()
    before = namespaces()
    assert not wrapped(before)
    for _ in range(2):
        vllm_moe_tune_plugin.register()
        vllm_moe_tune_plugin.register()
        assert fake_stack.states() == APPLIED
        now = wrapped(namespaces())
        assert {
            "flashinfer.trtllm_fp4_block_scale_routed_moe",
            "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe",
            f"{EXPERTS}.trtllm_nvfp4_moe.trtllm_moe_pack_topk_ids_weights",
            f"{EXPERTS}.trtllm_nvfp4_moe.TrtLlmNvFp4ExpertsModular._invoke_kernel",
            f"{EXPERTS}.trtllm_mxfp4_moe.TrtLlmMxfp4ExpertsModular._invoke_kernel",
            f"{FUSED_MOE}.fused_moe.moe_align_block_size",
            f"{FUSED_MOE}.fused_moe.TritonExperts.apply",
        } <= now
        # Inherited, and others inherit it, too: the base keeps its own.
        assert f"{EXPERTS}.trtllm_mxfp4_moe.TrtLlmMxfp4ExpertsBase._invoke_kernel" not in now
        # vLLM's own module keeps the function that its consumers copied.
        assert f"{FUSED_MOE}.utils.trtllm_moe_pack_topk_ids_weights" not in now
        vllm_moe_tune_plugin.unregister()
        vllm_moe_tune_plugin.unregister()
        assert_same(before, namespaces())


def test_registered_before_the_import_or_after_it_is_the_same(install):
    install()
    vllm_moe_tune_plugin.register()
    assert fake_stack.states() == dict.fromkeys(TUNINGS, "pending")
    fake_stack.load()
    early = {target: (patch.state, patch.reason) for target, patch in fake_stack.patches().items()}
    early_wrapped = wrapped(namespaces())
    vllm_moe_tune_plugin.unregister()
    assert not wrapped(namespaces())
    vllm_moe_tune_plugin.register()
    assert {target: (patch.state, patch.reason) for target, patch in fake_stack.patches().items()} == early
    assert wrapped(namespaces()) == early_wrapped
    assert State.PENDING not in {state for state, _ in early.values()}


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_of_imports(install, seed):
    import random

    install()
    vllm_moe_tune_plugin.register()
    modules = list(fake_stack.SERVING)
    random.Random(seed).shuffle(modules)
    for name in modules:
        importlib.import_module(name)
    assert fake_stack.states() == APPLIED
    assert not {patch.target for patch in fake_stack.patches().values() if patch.state in (State.PENDING, State.FAILED)}


def test_a_wrapper_below_or_above_the_real_patches(install):
    install()
    fake_stack.load()
    flashinfer = sys.modules["flashinfer.fused_moe"]
    original = flashinfer.trtllm_bf16_routed_moe
    tags: list[str] = []

    def foreign(tag: str) -> Any:
        def wrapper(function, instance, args, kwargs):
            tags.append(tag)
            return function(*args, **kwargs)

        return wrapper

    wrapt.wrap_function_wrapper(flashinfer, "trtllm_bf16_routed_moe", foreign("below"))
    below = flashinfer.trtllm_bf16_routed_moe
    vllm_moe_tune_plugin.register()
    wrapt.wrap_function_wrapper(flashinfer, "trtllm_bf16_routed_moe", foreign("above"))
    above = flashinfer.trtllm_bf16_routed_moe
    importlib.import_module(f"{FUSED_MOE}.config").FusedMoEConfig()
    flashinfer.trtllm_bf16_routed_moe(IDS)
    assert tags == ["above", "below"]
    assert sys.modules["flashinfer.fused_moe.core"].CALLS[-1][2] == 16_384
    assert sys.modules["flashinfer"].trtllm_bf16_routed_moe is not original
    vllm_moe_tune_plugin.unregister()
    assert flashinfer.trtllm_bf16_routed_moe is above
    assert above.__wrapped__ is below
    assert below.__wrapped__ is original
    assert sys.modules["flashinfer"].trtllm_bf16_routed_moe is original


# --- vLLM's lazy names -----------------------------------------------------------------------------------------------------


def test_lazy_names_look_again(install):
    install()
    fake_stack.load()
    lazy = sys.modules["vllm.utils.flashinfer"].flashinfer_trtllm_bf16_moe
    calls = sys.modules["flashinfer.fused_moe.core"].CALLS
    lazy(IDS)  # keeps the original
    assert calls[-1][2] == 8192
    vllm_moe_tune_plugin.register()
    sys.modules[f"{FUSED_MOE}.config"].FusedMoEConfig()
    lazy(IDS)  # keeps the wrapper
    assert calls[-1][2] == 16_384
    vllm_moe_tune_plugin.unregister()
    lazy(IDS)
    assert calls[-1][2] == 8192
    (find,) = (cell.cell_contents for cell in lazy.__closure__ if hasattr(cell.cell_contents, "cache_clear"))
    assert find() is sys.modules["flashinfer.fused_moe"].trtllm_bf16_moe
    assert not fake_stack.is_wrapper(find())


ODD_NAMES = """

def _with_an_empty_cell():
    def function():
        return later
    if function is None:
        later = 1
    return function

odd = _with_an_empty_cell()
"""


def test_a_function_with_an_empty_cell_beside_the_lazy_names(install):
    install({**fake_stack.STACK, "vllm.utils.flashinfer": fake_stack.STACK["vllm.utils.flashinfer"] + ODD_NAMES})
    importlib.import_module("vllm.utils.flashinfer")
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    assert fake_stack.states() == APPLIED
    vllm_moe_tune_plugin.unregister()
    assert not wrapped(namespaces())


# --- states ----------------------------------------------------------------------------------------------------------------


def test_nothing_is_known_before_register(install):
    install()
    assert vllm_moe_tune_plugin.status() == []
    vllm_moe_tune_plugin.unregister()
    assert vllm_moe_tune_plugin.status() == []


@pytest.mark.parametrize(
    ("value", "disabled"),
    [
        ("all", set(TUNINGS)),
        ("int32_ids", {"int32_ids"}),
        (" tuple_routing , autotune_bucket ", {"tuple_routing", "autotune_bucket"}),
        ("nonsense", set()),
        ("nonsense,int32_ids", {"int32_ids"}),
        ("", set()),
    ],
)
def test_disable(install, monkeypatch, logged, value, disabled):
    monkeypatch.setenv("MOE_TUNE_DISABLE", value)
    install()
    fake_stack.load()
    before = namespaces()
    vllm_moe_tune_plugin.register()
    assert fake_stack.states() == {name: "disabled" if name in disabled else "applied" for name in TUNINGS}
    assert ("'nonsense'" in logged.text) == ("nonsense" in value)
    if "nonsense" in value:
        assert all(name in logged.text for name in TUNINGS)
    if disabled == set(TUNINGS):
        changed = {key for key, value in namespaces().items() if value is not before.get(key)}
        assert changed <= {"vllm.v1.worker.gpu_worker.Worker.compile_or_warm_up_model"}


def test_unknown_settings_are_reported_and_ignored(install, monkeypatch, logged):
    monkeypatch.setenv("MOE_TUNE_DISABEL", "all")
    install()
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    assert fake_stack.states() == APPLIED
    assert "MOE_TUNE_DISABEL" in logged.text
    assert "MOE_TUNE_DISABLE" in logged.text


@pytest.fixture
def no_flashinfer(monkeypatch) -> None:
    class Blocked:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] == "flashinfer":
                raise ModuleNotFoundError(name)

    monkeypatch.setattr(sys, "meta_path", [Blocked(), *sys.meta_path])


def test_without_flashinfer(install, no_flashinfer):
    install({name: source for name, source in fake_stack.STACK.items() if not name.startswith("flashinfer")}, flashinfer=None)
    vllm_moe_tune_plugin.register()
    importlib.import_module(f"{FUSED_MOE}.fused_moe")
    importlib.import_module(f"{EXPERTS}.trtllm_lora_moe")
    status = {tuning["name"]: tuning for tuning in vllm_moe_tune_plugin.status()}
    for name in ("autotune_bucket", "tuple_routing"):
        assert status[name]["state"] == "unsupported"
        assert "flashinfer-python is not installed" in status[name]["reason"]
    assert status["low_latency_assignment"]["state"] == "applied"


def test_without_either_nothing_is_applied(install, no_flashinfer):
    install({"vllm": ""})
    vllm_moe_tune_plugin.register()
    assert set(fake_stack.states().values()) == {"unsupported"}
    assert all(tuning["reason"] for tuning in vllm_moe_tune_plugin.status())


def test_status_is_json_and_names_everything(install):
    install()
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    status = vllm_moe_tune_plugin.status()
    assert json.loads(json.dumps(status)) == status
    assert [tuning["name"] for tuning in status] == list(TUNINGS)
    for tuning in status:
        assert tuning.keys() == {"name", "state", "reason", "tuned", "patches"}
        for patch in tuning["patches"]:
            assert patch.keys() >= {"target", "state", "reason", "calls", "tuned"}
            assert patch["state"] in {state.value for state in State}
            assert patch["reason"] or patch["state"] in ("applied", "pending")


# --- failures of the real tunings ------------------------------------------------------------------------------------------

ROUTE = {
    "tuple_routing": ("as_tuple", tuple_routing),
    "int32_ids": ("as_int32", int32_ids),
}


@pytest.mark.parametrize("name", ROUTE)
def test_a_tuning_that_breaks_goes_stock_alone(install, monkeypatch, logged, name):
    attribute, module = ROUTE[name]
    install()
    vllm_moe_tune_plugin.register()
    fake_stack.load()

    def broken(*_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(module, attribute, broken)
    lora = sys.modules[f"{EXPERTS}.trtllm_lora_moe"].TrtLlmBf16LoRAExperts()
    experts = sys.modules[f"{EXPERTS}.trtllm_bf16_moe"].TrtLlmBf16ExpertsModular()
    calls = sys.modules["flashinfer.fused_moe.core"].CALLS
    for _ in range(3):
        experts.apply(None, IDS, WEIGHTS)
        lora.apply(None, IDS, WEIGHTS)
    routed = calls[-2][1]
    assert isinstance(routed, tuple) == (name != "tuple_routing")
    assert (calls[-1][1][0] is IDS) == (name == "int32_ids")
    assert fake_stack.states() == {**APPLIED, name: "failed"}
    errors = [record for record in logged.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert errors[0].exc_info[0] is ZeroDivisionError
    assert errors[0].exc_info[2].tb_frame is not None
    (status,) = (tuning for tuning in vllm_moe_tune_plugin.status() if tuning["name"] == name)
    assert status["reason"] == "ZeroDivisionError: ours"


# --- what is logged --------------------------------------------------------------------------------------------------------


def worker_is_up() -> Any:
    return importlib.import_module("vllm.v1.worker.gpu_worker").Worker().compile_or_warm_up_model()


def test_one_line_with_the_states_once_the_model_is_up(install, logged):
    install()
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    assert not logged.records
    assert worker_is_up() == 1.5
    worker_is_up()
    (record,) = logged.records
    assert record.levelname == "INFO"
    assert record.name == "vllm.moe_tune"
    assert all(f"{name}=applied" in record.message for name in TUNINGS)
    assert vllm_moe_tune_plugin.__version__ in record.message


def test_debug_has_a_line_for_every_patch(install, logged, monkeypatch):
    monkeypatch.setenv("MOE_TUNE_LOG", "debug")
    install()
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    for target, patch in fake_stack.patches().items():
        assert f"{target} is {patch.state}" in logged.text
    assert f"process {os.getpid()}" in logged.text


def test_states_are_written_to_the_folder(install, monkeypatch, tmp_path):
    folder = tmp_path / "status" / "deeper"
    monkeypatch.setenv("MOE_TUNE_STATUS_DIR", str(folder))
    monkeypatch.setattr(plugin.atexit, "register", lambda function: None)
    install()
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    worker_is_up()
    (file,) = folder.iterdir()
    written = json.loads(file.read_text())
    assert written["pid"] == os.getpid()
    assert {tuning["name"]: tuning["state"] for tuning in written["tunings"]} == APPLIED


def test_a_folder_that_cannot_be_written_is_a_warning(install, monkeypatch, tmp_path, logged):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOE_TUNE_STATUS_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(plugin.atexit, "register", lambda function: None)
    install()
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    assert worker_is_up() == 1.5
    assert "MOE_TUNE_STATUS_DIR" in logged.text


def test_the_modules_here_are_the_fake_ones(install):
    """Or all of the above would say nothing."""
    install()
    fake_stack.load()
    assert isinstance(sys.modules["flashinfer"], types.ModuleType)
    assert not hasattr(sys.modules["vllm"], "__version__")
