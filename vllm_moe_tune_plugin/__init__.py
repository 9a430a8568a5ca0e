"""MoE tunings for stock vLLM, loaded by vLLM itself.

vLLM finds :func:`register` through the ``vllm.general_plugins`` entry point and calls it in every process at engine
start. It wraps functions of vLLM's and FlashInfer's MoE layers once vLLM imports them; :func:`unregister` takes all of
it back. ``vllm-moe-tune doctor`` shows what became of each tuning on this machine.
"""

from __future__ import annotations

import logging
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "register", "status", "unregister"]


def register() -> None:
    """Apply the tunings in this process as vLLM imports what they change.

    Never raises: vLLM calls it unguarded, so an exception would end the engine. Calling it again does nothing. It imports
    neither vLLM's MoE layers nor FlashInfer and does not touch the GPU.
    """
    try:
        from vllm_moe_tune_plugin import plugin

        plugin.start(__version__)
    except Exception:
        logging.getLogger("vllm.moe_tune").exception("moe-tune: not loaded, vLLM stays stock")


def unregister() -> None:
    """Restore every function that was wrapped in this process, also below or above other plugins' wrappers."""
    from vllm_moe_tune_plugin import plugin

    plugin.stop()


def status() -> list[dict[str, Any]]:
    """What became of each tuning in this process.

    Returns:
        One ``{"name", "state", "reason", "tuned", "patches": [{"target", "state", "reason", "calls", "tuned", "serves"}]}``
        for each tuning; ``calls`` counts the calls that a patch's wrapper saw (not those that a CUDA graph replays),
        ``tuned`` those it changed, and that of a tuning is the sum over its patches. ``serves``: the patch only helps others.
        An empty list before :func:`register`.
    """
    from vllm_moe_tune_plugin import plugin

    return [record.as_json() for record in plugin.records()]
