"""What the tests of one release share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import compatibility
import pytest


@pytest.fixture(scope="session")
def observed() -> Iterator[Future[dict[str, Any]]]:
    """What doctor sees: another process, which may run beside those of the call sites."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(compatibility.observe)
