"""Write docs/states.md from the transition tables; with ``--check`` only say whether it is current.

python tools/states_diagram.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from onceborn.runtime.protocol import states

TARGET = Path(__file__).resolve().parent.parent / "docs" / "states.md"

_HEAD = """\
# The states

Generated from the transition tables in `onceborn/runtime/protocol/states.py` by `make docs`; a test
holds it current. What may be done in each state is decided by `rules.next_action`, and
`tests/test_rules.py` goes through every state that can be reached.
"""

_PARTS: tuple[tuple[str, str, Mapping[StrEnum, frozenset[StrEnum]], StrEnum], ...] = (
    (
        "An operation",
        "One creation. Parked is a flag beside the state: an operator has to look, and nothing is\n"
        "released. `preparing_release` is a release of the identity under way.",
        states.OPERATION_TRANSITIONS,
        states.OperationState.PREPARING,
    ),
    (
        "A step",
        "One required effect. From `running` to `running` is a takeover: a new attempt with a new\n"
        "token. `unknown` is left only by observing. `armed` and `cancelled` are the launch's own.",
        states.STEP_TRANSITIONS,
        states.StepState.PLANNED,
    ),
    (
        "A compensation",
        "The undoing of one effect of ours, beside the step's own state. `transferred` is what\n"
        "could not be undone safely: a cleanup job or the quarantine holds it, with its proof.",
        states.COMPENSATION_TRANSITIONS,
        states.CompensationState.NONE,
    ),
)


def render() -> str:
    """The page."""
    return "\n".join([_HEAD, *(_section(*part) for part in _PARTS)])


def _section(
    title: str, text: str, table: Mapping[StrEnum, frozenset[StrEnum]], first: StrEnum
) -> str:
    order = list(type(first))
    lines = [f"## {title}", "", text, "", "```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    for before in order:
        afters = sorted(table[before], key=order.index)
        lines += [f"    {before} --> {after}" for after in afters]
        if not afters:
            lines.append(f"    {before} --> [*]")
    return "\n".join([*lines, "```", ""])


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare it. Returns the exit status."""
    page = render()
    if "--check" not in arguments:
        TARGET.write_text(page, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == page:
        return 0
    sys.stderr.write("docs/states.md is not current: run `make docs`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
