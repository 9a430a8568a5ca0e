"""The plugin's life in one process: register, report, unregister."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pathlib
import platform
import sys
import threading
from collections.abc import Sequence

from vllm_moe_tune_plugin import tunings
from vllm_moe_tune_plugin.ledger import State, TuningRecord
from vllm_moe_tune_plugin.patching import Advice, Group, ImportWatch, Observe, Patch, Verdict, restore_copies, unsupported
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.tactics import UntunedCalls

# Below vLLM's own logger, so that its handlers show these lines with rank and pid.
logger = logging.getLogger("vllm.moe_tune")

_watch = ImportWatch()
_lock = threading.RLock()
_session: Session | None = None

# Where a process of an engine has all that it will have: the first of these that returns in a process gives its log line. A
# worker has loaded the model, run it and captured its CUDA graphs by then. At the time of register() it would be too soon:
# nothing is imported, and vLLM since 0.31 has not set up its logging.
_UP = (
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
    "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
    "vllm.v1.engine.core:EngineCore._initialize_kv_caches",  # its __init__ is what loads the plugin
    "vllm.v1.engine.llm_engine:LLMEngine.__init__",
    "vllm.v1.engine.async_llm:AsyncLLM.__init__",
)


class Session:
    """All patches between one ``register()`` and its ``unregister()``."""

    def __init__(self, version: str, settings: Settings) -> None:
        self.version = version
        self.settings = settings
        self.patches: dict[str, Sequence[Patch]] = {}
        self._reported = False
        for name in tunings.NAMES:
            self.patches[name] = own = self._patches_of(name)
            group = Group()
            for patch in own:
                patch.group = group
                if name in settings.disable:
                    patch.settle(Verdict(State.DISABLED, "MOE_TUNE_DISABLE names it"))
                patch.settle_if_missing()
        self.untuned_calls = UntunedCalls()
        self.reports = [self.untuned_calls.patch(), *(Patch(target, self._report_when_up) for target in _UP)]

    def _patches_of(self, name: str) -> Sequence[Patch]:
        """A tuning's patches; where it cannot even name them, one that says why: the others go on."""
        try:
            return tuple(tunings.patches_of(name, self.settings))
        except Exception as error:
            broken = Patch(f"{tunings.__name__}.{name}:patches", unsupported)
            broken.fail(error)
            return (broken,)

    def start(self) -> None:
        # Listen first: another thread may be importing.
        _watch.start((name for patch in self.all_patches() for name in patch.modules), self._arrived)
        for patch in self.all_patches():
            patch.attempt()
        _forget_lazy_names()
        for complaint in self.settings.complaints:
            logger.warning("moe-tune: %s", complaint)
        self._debug(f"moe-tune {self.version} is loaded in process {os.getpid()}")
        for patch in self.all_patches():
            if patch.state is not State.PENDING:
                self._debug_patch(patch)

    def stop(self) -> bool:
        _watch.stop()
        atexit.unregister(self._write_status)
        wrappers = [wrapper for patch in self.all_patches() for wrapper in patch.wrappers]
        clean = [patch.undo() for patch in self.all_patches()]
        restore_copies(wrappers)
        return all(clean)

    def records(self) -> list[TuningRecord]:
        return [TuningRecord(name, tuple(patch.record() for patch in own)) for name, own in self.patches.items()]

    def all_patches(self) -> list[Patch]:
        return [*(patch for own in self.patches.values() for patch in own), *self.reports]

    def _arrived(self, module: str) -> None:
        for patch in self.all_patches():
            if module in patch.modules and patch.state is State.PENDING:
                patch.attempt()
                self._debug_patch(patch)

    def _debug_patch(self, patch: Patch) -> None:
        self._debug(f"moe-tune: {patch.target} is {patch.state} {patch.reason}".rstrip())

    def _debug(self, line: str) -> None:
        # At INFO, because vLLM's handlers drop what is below their own level.
        if self.settings.log == "debug":
            logger.info(line)

    def _report_when_up(self, _: object) -> Advice:
        return Observe(lambda *_: self._report())

    def _report(self) -> None:
        if not self._reported:
            self._reported = True
            states = ", ".join(f"{record.name}={record.state}" for record in self.records())
            logger.info("moe-tune %s: %s", self.version, states)
            if self.settings.status_dir:
                self._write_status()
                atexit.register(self._write_status)

    def _write_status(self) -> None:
        """Leave the states for whoever asked for them; a folder that cannot be written is no reason to stop an engine."""
        status = {
            "version": self.version,
            "pid": os.getpid(),
            "tunings": [record.as_json() for record in self.records()],
            "calls_without_tactic": self.untuned_calls.as_json(),
        }
        try:
            folder = pathlib.Path(self.settings.status_dir)
            folder.mkdir(parents=True, exist_ok=True)
            # Containers that share the folder have the same process numbers.
            (folder / f"moe-tune-{platform.node()}-{os.getpid()}.json").write_text(json.dumps(status, indent=1))
        except OSError as error:
            logger.warning("moe-tune: cannot write to MOE_TUNE_STATUS_DIR: %s", error)


def start(version: str) -> None:
    """Start the plugin in this process, once."""
    global _session
    with _lock:
        if _session is None:
            session = Session(version, Settings.from_environ(os.environ, tunings.NAMES))
            try:
                session.start()
            except BaseException:
                session.stop()  # nothing of it may stay behind
                raise
            _session = session


def stop() -> None:
    """Restore stock behaviour in this process."""
    global _session
    with _lock:
        if _session is not None:
            session, _session = _session, None
            if not session.stop():
                logger.warning("moe-tune: a foreign wrapper still holds one of ours, which now only passes calls on")
            _forget_lazy_names()


def records() -> list[TuningRecord]:
    """The tunings' states in this process; empty while the plugin is not registered."""
    return _session.records() if _session is not None else []


def session() -> Session | None:
    """What is registered in this process; None while nothing is."""
    return _session


def _forget_lazy_names() -> None:
    """Make vLLM's lazy FlashInfer names look their functions up again: they keep what they found first."""
    module = sys.modules.get("vllm.utils.flashinfer")
    for function in list(vars(module).values()) if module is not None else []:
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                forget = getattr(cell.cell_contents, "cache_clear", None)
                if forget is not None:
                    forget()
