"""register() in processes of its own: fast, light, idempotent, and it never raises."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import fake_stack
import pytest

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin import patching, plugin, tunings
from vllm_moe_tune_plugin.patching import Patch
from vllm_moe_tune_plugin.settings import Settings

ROOT = pathlib.Path(vllm_moe_tune_plugin.__file__).parents[1]


# Importing torch takes seconds: one process does it, and is forked for each test.
ZYGOTE = """
import faulthandler, gc, importlib.metadata, inspect, json, os, runpy, sys, traceback
import packaging.version, torch

gc.freeze()  # a collection that looks through all of torch takes 80 ms, whoever's turn it is when it comes

for line in sys.stdin:
    folder = json.loads(line)
    child = os.fork()
    if not child:
        status = 1
        try:
            os.chdir(folder)
            sys.path.insert(0, folder)
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
            faulthandler.dump_traceback_later(45, exit=True)
            runpy.run_path(os.path.join(folder, "script.py"), run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def zygote():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOE_TUNE_")}
    environment["PYTHONPATH"] = str(ROOT)
    with subprocess.Popen(
        [sys.executable, "-c", ZYGOTE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(tmp_path, zygote):
    """Run Python code in a process that has imported torch, with the fake stack; returns what it prints."""
    fake_stack.write(tmp_path, fake_stack.STACK)
    only = f"from vllm_moe_tune_plugin import tunings\ntunings.NAMES = {fake_stack.TUNINGS!r}\n"

    def run_code(code: str, *, all_tunings: bool = False) -> str:
        (tmp_path / "script.py").write_text(("" if all_tunings else only) + textwrap.dedent(code))
        for name in ("out", "err"):
            (tmp_path / name).unlink(missing_ok=True)
        zygote.stdin.write(f"{json.dumps(str(tmp_path))}\n")
        zygote.stdin.flush()
        assert int(zygote.stdout.readline()) == 0, (tmp_path / "err").read_text()
        return (tmp_path / "out").read_text().strip()

    return run_code


def test_under_50_ms_and_light(run):
    code = """
        import sys, time
        import torch

        def milliseconds():
            start = time.process_time()  # of this process alone: the machine is shared
            from vllm_moe_tune_plugin import register
            register()
            return 1e3 * (time.process_time() - start)

        assert "vllm_moe_tune_plugin" not in sys.modules
        assert "wrapt" not in sys.modules
        print(milliseconds(), milliseconds())
        assert not [name for name in sys.modules if name.partition(".")[0] in ("vllm", "flashinfer", "triton")]
        assert not torch.cuda.is_initialized()
        from vllm_moe_tune_plugin import status
        states = {tuning["name"]: tuning["state"] for tuning in status()}
        assert states.pop("cache_identity") == "native"  # the fake stack persists nothing
        assert set(states.values()) == {"pending"}
    """
    times = [tuple(map(float, run(code, all_tunings=True).split())) for _ in range(5)]
    assert min(first for first, _ in times) < 50
    assert min(again for _, again in times) < 1


def test_cuda_is_not_even_asked_for(run):
    run(f"""
        import importlib, logging
        import torch

        def forbidden(*args, **kwargs):
            raise AssertionError("touches the GPU")

        for name in ("_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_properties"):
            setattr(torch.cuda, name, forbidden)
        errors = []
        handler = logging.Handler(logging.ERROR)
        handler.emit = errors.append
        logging.getLogger("vllm.moe_tune").addHandler(handler)
        import vllm_moe_tune_plugin
        vllm_moe_tune_plugin.register()
        for name in {fake_stack.SERVING!r}:
            importlib.import_module(name)
        assert {{tuning["state"] for tuning in vllm_moe_tune_plugin.status()}} == {{"applied"}}
        assert not errors
    """)


def test_spawned_workers_register_for_themselves(run):
    out = run(f"""
        import importlib
        import multiprocessing

        def work(queue):
            import vllm_moe_tune_plugin
            assert vllm_moe_tune_plugin.status() == []
            vllm_moe_tune_plugin.register()
            vllm_moe_tune_plugin.register()
            for name in {fake_stack.SERVING!r}:
                importlib.import_module(name)
            import flashinfer
            kernel = flashinfer.fused_moe.trtllm_bf16_routed_moe
            depth = 0
            while hasattr(kernel, "__wrapped__"):
                kernel, depth = kernel.__wrapped__, depth + 1
            queue.put((sorted({{tuning["state"] for tuning in vllm_moe_tune_plugin.status()}}), depth))

        if __name__ == "__main__":
            import vllm_moe_tune_plugin
            vllm_moe_tune_plugin.register()
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            workers = [context.Process(target=work, args=(queue,)) for _ in range(2)]
            for worker in workers:
                worker.start()
            print([queue.get(timeout=100) for _ in workers])
            for worker in workers:
                worker.join()
            import sys
            assert "flashinfer" not in sys.modules
    """)
    assert out == "[(['applied'], 1), (['applied'], 1)]"


def test_forked_workers_have_what_their_parent_registered(run):
    out = run(f"""
        import importlib
        import multiprocessing
        import vllm_moe_tune_plugin
        vllm_moe_tune_plugin.register()

        def work(queue):
            vllm_moe_tune_plugin.register()
            for name in {fake_stack.SERVING!r}:
                importlib.import_module(name)
            queue.put(sorted({{tuning["state"] for tuning in vllm_moe_tune_plugin.status()}}))

        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        worker = context.Process(target=work, args=(queue,))
        worker.start()
        print(queue.get(timeout=100))
        worker.join()
        print({{tuning["state"] for tuning in vllm_moe_tune_plugin.status()}})
    """)
    assert out.splitlines() == ["['applied']", "{'pending'}"]


def test_modules_imported_in_two_threads(run):
    out = run(f"""
        import importlib, random, sys, threading
        sys.setswitchinterval(1e-6)
        import vllm_moe_tune_plugin
        vllm_moe_tune_plugin.register()
        barrier = threading.Barrier(2)
        errors = []

        def work(seed):
            names = list({fake_stack.SERVING!r})
            random.Random(seed).shuffle(names)
            barrier.wait()
            for name in names:
                try:
                    importlib.import_module(name)
                except BaseException as error:
                    errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(errors, sorted({{tuning["state"] for tuning in vllm_moe_tune_plugin.status()}}))
    """)
    assert out == "[] ['applied']"


def test_a_submodule_imported_while_another_thread_imports_its_package(run):
    """Finders run under the import lock: one that waits for the package there never returns."""
    out = run("""
        import builtins, pathlib, threading
        init = pathlib.Path("flashinfer/__init__.py")
        init.write_text(f"import builtins, time\\nbuiltins.begun.set()\\ntime.sleep(0.3)\\n{init.read_text()}")
        builtins.begun = threading.Event()
        import vllm_moe_tune_plugin
        vllm_moe_tune_plugin.register()
        package = threading.Thread(target=__import__, args=("flashinfer",))
        package.start()
        builtins.begun.wait()
        import flashinfer.autotuner
        package.join()
        print(callable(flashinfer.trtllm_fp8_block_scale_routed_moe))
    """)
    assert out == "True"


# --- never raises ----------------------------------------------------------------------------------------------------------


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken inside")


BREAKS = {
    "settings": (Settings, "from_environ"),
    "the import hooks": (patching.ImportWatch, "start"),
    "the lazy names": (plugin, "_forget_lazy_names"),
    "the session": (plugin, "Session"),
}


@pytest.mark.parametrize("part", BREAKS)
def test_never_raises_and_leaves_vllm_stock(install, monkeypatch, logged, part):
    """With vLLM imported already: what was wrapped before it broke must come off again, for the log says stock."""
    install()
    fake_stack.load()
    with monkeypatch.context() as patched:
        patched.setattr(*BREAKS[part], broken)
        vllm_moe_tune_plugin.register()
    assert "vLLM stays stock" in logged.text
    assert "broken inside" in logged.text
    flashinfer = sys.modules["flashinfer"]
    assert not fake_stack.is_wrapper(flashinfer.trtllm_fp8_block_scale_routed_moe)
    assert vllm_moe_tune_plugin.status() == []


def test_one_broken_tuning_does_not_take_the_others_along(install, monkeypatch, logged):
    install()
    patches_of = tunings.patches_of
    monkeypatch.setattr(
        tunings, "patches_of", lambda name, settings: broken() if name == "int32_ids" else patches_of(name, settings)
    )
    vllm_moe_tune_plugin.register()
    fake_stack.load("vllm.config", *fake_stack.SERVING)
    assert "broken inside" in logged.text
    states = fake_stack.states()
    assert states.pop("int32_ids") == "failed"
    assert set(states.values()) == {"applied"}


@pytest.mark.parametrize("method", ["missing", "decide"])
def test_a_patch_that_breaks_is_failed_and_the_others_go_on(install, monkeypatch, method):
    install()
    target = "vllm.gone:function" if method == "missing" else "vllm.config:get_current_vllm_config_or_none"
    patches_of = tunings.patches_of

    def with_a_broken_one(name, settings):
        own = tuple(patches_of(name, settings))
        return (*own, Patch(target, broken, missing=broken)) if name == "int32_ids" else own

    monkeypatch.setattr(tunings, "patches_of", with_a_broken_one)
    vllm_moe_tune_plugin.register()
    fake_stack.load("vllm.config", *fake_stack.SERVING)
    states = fake_stack.states()
    assert states.pop("int32_ids") == "failed"
    assert set(states.values()) == {"applied"}


def test_twice_is_once(install):
    install()
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    kernel = sys.modules["flashinfer"].trtllm_fp8_block_scale_routed_moe
    session = plugin.session()
    vllm_moe_tune_plugin.register()
    assert sys.modules["flashinfer"].trtllm_fp8_block_scale_routed_moe is kernel
    assert plugin.session() is session
    assert not fake_stack.is_wrapper(kernel.__wrapped__)
