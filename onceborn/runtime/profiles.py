"""Agent profiles: named command templates that live on the server, in a TOML file.

    [profiles.reviewer]
    argv = ["claude", "--print", "--prompt-file", "{prompt_file}"]
    environment = ["ANTHROPIC_API_KEY"]
    time_limit_s = 3600
    enabled = true

A caller picks a profile by name and never supplies argv. ``{prompt_file}``, ``{task_id}`` and
``{run_id}`` in an argument are filled in at launch; every other brace stays as it is.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from .protocol.errors import ConfigurationError
from .protocol.evidence import Closed
from .protocol.plan import Name

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS: Final = re.compile(r"ONCEBORN_.*|TEMPORAL_.*|DATABASE_URL|PG[A-Z]+")


def _argument(value: str) -> str:
    if "\x00" in value:
        raise ValueError("must not contain a NUL character")
    return value


def _variable(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise ValueError(f"{value!r} is not the name of an environment variable")
    if _OURS.fullmatch(value):
        raise ValueError(f"{value} is this server's own and is never given to an agent")
    return value


Argument = Annotated[str, StringConstraints(strict=True), AfterValidator(_argument)]
Variable = Annotated[str, StringConstraints(strict=True), AfterValidator(_variable)]


def _command_first(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value[0].strip():
        raise ValueError("the first item is the program and must not be empty")
    return value


class Profile(Closed):
    """How one kind of agent is started. The working directory is always the task's worktree."""

    argv: Annotated[tuple[Argument, ...], Field(min_length=1), AfterValidator(_command_first)]
    environment: tuple[Variable, ...] = ()
    """Names that are passed on from the worker's environment, beside the base ones of the shim."""
    time_limit_s: Annotated[int, Field(strict=True, ge=1, le=7 * 24 * 3600)] = 3600
    enabled: Annotated[bool, Field(strict=True)] = True


class _File(Closed):
    profiles: dict[Name, Profile] = Field(default_factory=dict)


def load_profiles(path: Path) -> dict[str, Profile]:
    """The profiles of the file, by name; none where there is no such file.

    Raises:
        ConfigurationError: names the file and the field.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}", file=str(path)
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8 text", file=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not TOML: {error}", file=str(path)) from None
    try:
        return dict(_File.model_validate(document).profiles)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"] if part != "[key]")
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "is not a field of a profile"
        raise ConfigurationError(
            f"{path}: {field}: {message}", file=str(path), field=field
        ) from None
