"""Databases of earlier schemas with data in them, and the host's folder that belongs to one.

``tests/upgrades/<revision>.<backend>.sql`` holds rows as plain SQL, one statement a line, and in
comments what else there was: worktrees and intents. tools/record_upgrade.py writes such a file, the
tests load it. Nothing in a file names the machine: the repository is at an address that the host's
git configuration leads to wherever it is.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

FOLDER = Path(__file__).parent.parent / "upgrades"
ADDRESS = "https://git.example.invalid/team/"
SOURCE = f"{ADDRESS}service"

_ALWAYS = "2026-01-01T00:00:00Z"
_GIT = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{f"GIT_{who}_NAME": "upgrade" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "upgrade@localhost" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_DATE": _ALWAYS for who in ("AUTHOR", "COMMITTER")},
}


def git(folder: Path, *arguments: str) -> str:
    """Git as a person of an earlier time would run it: the same commits each time."""
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=_GIT, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def make_source(folder: Path, data: Path) -> None:
    """The repository, and the configuration by which a host finds it. ``taken`` is a branch."""
    source = folder / "team" / "service"
    source.mkdir(parents=True)
    git(source, "init", "--quiet", "--initial-branch", "trunk")
    (source / "README").write_text("a service\n")
    git(source, "add", "README")
    git(source, "commit", "--quiet", "-m", "first")
    git(source, "branch", "taken")
    (data / "git").mkdir(parents=True)
    (data / "git" / "host.gitconfig").write_text(
        f'[url "{source.parent.as_uri()}/"]\n\tinsteadOf = {ADDRESS}\n'
    )


@dataclass
class Dump:
    """Rows as SQL, and what was on the host beside them."""

    statements: list[str] = field(default_factory=list)
    worktrees: list[dict[str, str]] = field(default_factory=list)
    """``clone`` and ``path`` below the data folder, ``branch``, ``commit``, ``key``."""
    intents: list[dict[str, str]] = field(default_factory=list)
    """``name`` and ``text``, with ``{data}`` for the data folder."""

    def write(self, path: Path, about: str) -> None:
        lines = [f"-- {line}" for line in about.splitlines()]
        lines += [f"-- worktree {json.dumps(each, sort_keys=True)}" for each in self.worktrees]
        lines += [f"-- intent {json.dumps(each, sort_keys=True)}" for each in self.intents]
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join([*lines, *self.statements]) + "\n")

    @classmethod
    def read(cls, path: Path) -> Dump:
        dump = cls()
        for line in path.read_text().splitlines():
            if line.startswith("-- worktree "):
                dump.worktrees.append(json.loads(line.removeprefix("-- worktree ")))
            elif line.startswith("-- intent "):
                dump.intents.append(json.loads(line.removeprefix("-- intent ")))
            elif not line.startswith("--"):
                dump.statements.append(line)
        return dump

    def load(self, connection: Connection) -> None:
        for statement in self.statements:
            connection.exec_driver_sql(statement)

    def build(self, data: Path) -> None:
        """What was on the host, made anew by plain git."""
        source = _source_of(data)
        for each in self.worktrees:
            clone = data / each["clone"]
            if not clone.exists():
                _make_clone(clone, source)
            git(
                clone, "update-ref", "--create-reflog", "-m", each["key"],
                f"refs/heads/{each['branch']}", each["commit"], "0" * len(each["commit"]),
            )  # fmt: skip
            git(clone, "worktree", "add", "--quiet", str(data / each["path"]), each["branch"])
        for each in self.intents:
            file = data / "intents" / each["name"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(each["text"].replace("{data}", str(data)))


def _source_of(data: Path) -> str:
    line = (data / "git" / "host.gitconfig").read_text().splitlines()[0]
    return line.split('"')[1] + "service"


def _make_clone(clone: Path, source: str) -> None:
    clone.parent.mkdir(parents=True, exist_ok=True)
    git(clone.parent, "init", "--quiet", "--bare", "--template=", str(clone))
    git(clone, "config", "remote.origin.url", SOURCE)
    git(clone, "config", "remote.origin.fetch", "+refs/heads/*:refs/remotes/origin/*")
    git(clone, "fetch", "--quiet", source, "+refs/heads/*:refs/remotes/origin/*")


# -- recording -------------------------------------------------------------------------------------


def statements_of(connection: Connection, tables: Any) -> Iterator[str]:
    """All rows as INSERT statements, parents before children, one statement a line."""
    for table in tables:
        names = ", ".join(column.name for column in table.columns)
        rows = connection.execute(select(table).order_by(*table.primary_key.columns))
        for row in rows:
            values = ", ".join(_literal(value) for value in row)
            yield f"INSERT INTO {table.name} ({names}) VALUES ({values});"


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"  # both databases read it
    if isinstance(value, int):
        return str(value)
    assert isinstance(value, str)
    assert "\n" not in value
    return "'" + value.replace("'", "''") + "'"


def worktrees_of(data: Path) -> list[dict[str, str]]:
    """Every worktree on the host, with the mark that its branch carries."""
    found = []
    for clone in sorted((data / "repositories").glob("*.git")):
        for admin in sorted((clone / "worktrees").glob("*")):
            path = Path((admin / "gitdir").read_text().strip()).parent
            branch = (admin / "HEAD").read_text().strip().removeprefix("ref: refs/heads/")
            first = (clone / "logs" / "refs" / "heads" / branch).read_text().splitlines()[0]
            head, key = first.split("\t")
            found.append(
                {
                    "clone": str(clone.relative_to(data)),
                    "path": str(path.relative_to(data)),
                    "branch": branch,
                    "commit": head.split(" ")[1],
                    "key": key,
                }
            )
    return found


def intents_of(data: Path) -> list[dict[str, str]]:
    """Every intent on the host."""
    return [
        {"name": file.name, "text": file.read_text().replace(str(data), "{data}")}
        for file in sorted((data / "intents").glob("*.json"))
    ]
