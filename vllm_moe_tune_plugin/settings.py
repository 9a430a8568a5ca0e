"""The plugin's settings, all read from the environment once, when :func:`register` runs.

They are named ``MOE_TUNE_*`` and never ``VLLM_*``: vLLM warns about ``VLLM_*`` names that it does not know and refuses
them in strict mode. A value that means nothing is reported and ignored; it never stops the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PREFIX = "MOE_TUNE_"

#: Every setting, with the line that ``vllm-moe-tune doctor`` and the README show for it.
HELP: Mapping[str, str] = {
    "MOE_TUNE_DISABLE": "`all`, or names of tunings separated by commas: these stay stock",
    "MOE_TUNE_LOG": "`debug`: one line for every patch, in every process, and why the decode kernel leaves a layer stock",
    "MOE_TUNE_STATUS_DIR": "a folder: each worker leaves its states and call counts there as JSON",
    "MOE_TUNE_DECODE_TOKENS": "a number: most tokens for the decode kernel instead of what was measured; `0`: never",
    "MOE_TUNE_CACHE_DIR": "the folder of what `vllm-moe-tune tune` found; without it, the user's cache",
    "MOE_TUNE_CUTLASS_BUCKET": "`1`: also raise the CUTLASS experts' bucket above 8192 (costs memory, vLLM PR 53186)",
}

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        disable: names of the tunings that the user turned off.
        log: ``info`` or ``debug``.
        status_dir: the folder in which each worker leaves its states, empty for none.
        decode_tokens: the decode kernel's window in tokens, None for what was measured.
        cache_dir: the folder of what `vllm-moe-tune tune` found, empty for the user's cache.
        cutlass_bucket: let the autotune bucket of FlashInfer's CUTLASS experts exceed 8192 tokens.
        complaints: one sentence for each value that means nothing, for the log.
    """

    disable: frozenset[str] = frozenset()
    log: str = "info"
    status_dir: str = ""
    decode_tokens: int | None = None
    cache_dir: str = ""
    cutlass_bucket: bool = False
    complaints: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], tunings: Iterable[str]) -> Settings:
        """Read the settings.

        Args:
            environ: usually ``os.environ``.
            tunings: the names that ``MOE_TUNE_DISABLE`` may hold.
        """
        known = tuple(tunings)
        complaints: list[str] = []

        for name in sorted(environ):
            if name.startswith(PREFIX) and name not in HELP:
                complaints.append(f"{name} is no setting of this plugin; there are {', '.join(HELP)}")

        disabled: set[str] = set()
        for name in filter(None, (part.strip() for part in environ.get("MOE_TUNE_DISABLE", "").split(","))):
            if name == "all":
                disabled.update(known)
            elif name in known:
                disabled.add(name)
            else:
                complaints.append(f"MOE_TUNE_DISABLE names {name!r}; there are all, {', '.join(known)}")

        log = environ.get("MOE_TUNE_LOG", "").strip().lower()
        if log not in ("", "info", "debug"):
            complaints.append(f"MOE_TUNE_LOG is {log!r}; it may be info or debug")

        tokens = environ.get("MOE_TUNE_DECODE_TOKENS", "").strip()
        # isdecimal() alone would let digits of other scripts through, of any length.
        decode_tokens = int(tokens) if tokens.isascii() and tokens.isdecimal() and len(tokens) < 9 else None
        if tokens and decode_tokens is None:
            complaints.append(f"MOE_TUNE_DECODE_TOKENS is {tokens!r}; it may be a number of tokens")

        cutlass = environ.get("MOE_TUNE_CUTLASS_BUCKET", "").strip().lower()
        if cutlass not in _TRUE + _FALSE:
            complaints.append(f"MOE_TUNE_CUTLASS_BUCKET is {cutlass!r}; it may be 0 or 1")

        return cls(
            disable=frozenset(disabled),
            log=log if log == "debug" else "info",
            status_dir=environ.get("MOE_TUNE_STATUS_DIR", "").strip(),
            decode_tokens=decode_tokens,
            cache_dir=environ.get("MOE_TUNE_CACHE_DIR", "").strip(),
            cutlass_bucket=cutlass in _TRUE,
            complaints=tuple(complaints),
        )
