"""What commands print, and how they end."""

from __future__ import annotations

import json
from typing import Any, Final

import typer

from ..runtime.protocol.errors import ConfigurationError, OncebornError
from .refusals import Refused, ServerUnavailable

DONE: Final = 0
REFUSED: Final = 1
USAGE: Final = 2
UNAVAILABLE: Final = 3
INTERRUPTED: Final = 130


def exit_code(error: OncebornError) -> int:
    """0 done, 1 refused, 2 usage or configuration, 3 not reachable now."""
    if isinstance(error, Refused):
        return UNAVAILABLE if error.status >= 500 else REFUSED
    if isinstance(error, ConfigurationError):
        return USAGE
    if isinstance(error, ServerUnavailable) or error.http_status >= 500:
        return UNAVAILABLE
    return REFUSED


def explain(error: OncebornError) -> str:
    """The message, what was undone, and what to do."""
    lines = [error.message]
    if isinstance(error, Refused):
        problem = error.problem
        lines += [f"  undone: {_undone(entry)}" for entry in problem.get("undone") or []]
        if error.status == 401:
            lines.append("  Set ONCEBORN_TOKEN to a token of `onceborn token create`.")
        elif "task_id" in problem:
            lines.append(f"  task: {problem['task_id']}")
        if "code" in problem:
            lines.append(f"  code: {problem['code']}")
    return "\n".join(plain(line) for line in lines)


def _undone(entry: Any) -> str:
    if isinstance(entry, dict) and {"step", "how"} <= entry.keys():
        return f"{entry['step']} ({entry['how']})"
    return json.dumps(entry)


def show_json(document: Any) -> None:
    """One JSON document on stdout, for programs."""
    typer.echo(json.dumps(document, ensure_ascii=False, indent=2))


def show_fields(title: str, fields: dict[str, Any]) -> None:
    """A headline and its fields, for people."""
    typer.echo(plain(title))
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        if value is not None:
            typer.echo(f"  {name:<{width}}  {plain(str(value))}")


def plain(text: str) -> str:
    """The text without what a terminal would obey: a title may come from anybody."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
