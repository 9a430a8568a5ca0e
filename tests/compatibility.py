"""What becomes of each tuning on each stock release: the table that the tests and the README share.

python tests/compatibility.py --update   # in an environment with vLLM: replace its row
python tests/compatibility.py --readme   # write the README's table
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent
DATA = HERE / "compatibility.json"
README = HERE.parent / "README.md"
MARKED = re.compile(r"(?<=<!-- compatibility -->\n).*?(?=<!-- /compatibility -->)", re.DOTALL)


def load() -> list[dict[str, Any]]:
    """Rows ``{"vllm", "flashinfer", "tunings": {name: state}, "patches": {target: [state, reason]}}``, oldest vLLM first."""
    rows: list[dict[str, Any]] = json.loads(DATA.read_text()) if DATA.exists() else []
    return rows


def observe() -> dict[str, Any]:
    """The row of the environment that runs this, as `vllm-moe-tune doctor` sees it."""
    from vllm_moe_tune_plugin.doctor import examine

    look = examine()
    return {
        "vllm": look["stack"]["vllm"],
        "flashinfer": look["stack"]["flashinfer-python"],
        "tunings": {tuning["name"]: tuning["state"] for tuning in look["tunings"]},
        "patches": {
            f"{tuning['name']}: {patch['target']}": [patch["state"], patch["reason"]]
            for tuning in look["tunings"]
            for patch in tuning["patches"]
        },
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    names = list(rows[-1]["tunings"])
    lines = [
        "| vLLM | FlashInfer | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for row in rows:
        states = " | ".join(f"**{state}**" if state == "applied" else state for state in row["tunings"].values())
        lines.append(f"| {row['vllm']} | {row['flashinfer']} | {states} |")
    return "\n".join(lines) + "\n"


def _order(row: dict[str, Any]) -> list[list[int]]:
    return [[int(part) for part in re.findall(r"\d+", row[key])] for key in ("vllm", "flashinfer")]


if __name__ == "__main__":
    if "--update" in sys.argv:
        new = observe()
        kept = [row for row in load() if (row["vllm"], row["flashinfer"]) != (new["vllm"], new["flashinfer"])]
        DATA.write_text(json.dumps(sorted([*kept, new], key=_order), indent=1) + "\n")
    if "--readme" in sys.argv:
        README.write_text(MARKED.sub(lambda match: markdown(load()), README.read_text()))
