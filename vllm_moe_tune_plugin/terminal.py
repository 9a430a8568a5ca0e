"""Where the commands print."""

from __future__ import annotations

from rich.console import Console

#: Columns of what is no terminal.
WIDE = 240


def new_console() -> Console:
    """Lines are for people and logs alike: they are never cut, and what is no terminal has room for every table."""
    console = Console(soft_wrap=True, highlight=False)
    return console if console.is_terminal else Console(soft_wrap=True, highlight=False, width=WIDE)
