"""Installing the plugin beside stock vLLM adds the plugin and wrapt, and moves no pin."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement


def required_by(distribution: str) -> dict[str, Requirement]:
    """The requirements of an installed distribution that apply here, by name."""
    requirements = map(Requirement, importlib.metadata.requires(distribution) or [])
    return {
        requirement.name.lower().replace("_", "-"): requirement
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def closure(distribution: str) -> set[str]:
    """All that is installed because a distribution asks for it, with all of its requirements' extras."""
    seen: set[str] = set()
    waiting = [distribution]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # left out of this environment
        for requirement in map(Requirement, requirements):
            try:
                importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                continue
            waiting.append(requirement.name.lower().replace("_", "-"))
    return seen


def test_all_but_wrapt_comes_with_vllm() -> None:
    wanted = required_by("vllm-moe-tune-plugin")
    assert set(wanted) - closure("vllm") <= {"wrapt"}
    for name, requirement in wanted.items():
        installed = importlib.metadata.version(name)
        assert requirement.specifier.contains(installed, prereleases=True), f"{name} {installed} would be moved"
