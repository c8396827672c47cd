"""The states from which cells start. Each is built once by the product itself, then copied."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceborn.runtime import access, failpoints, workspaces
from onceborn.runtime.ledger import hosts
from onceborn.runtime.protocol import rules

from .bystanders import Bystanders, plant
from .hands import HOST, Hands, Place
from .ledger import Ledger
from .world import git


@dataclass(frozen=True)
class Scene:
    """``phase`` is what a cell's process does from here; ``end`` what it must come to."""

    name: str
    phase: str
    end: str
    build: Callable[[Place], Bystanders]


class _CutOff(BaseException):
    """The owner is gone at this point; nothing handles it."""


def _repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    git("init", "-q", "-b", "trunk", cwd=folder)
    (folder / "file.txt").write_text("content\n")
    (folder / "docs").mkdir()
    (folder / "docs" / "more.txt").write_text("more\n" * 50)
    git("add", ".", cwd=folder)
    git("commit", "-q", "-m", "first", cwd=folder)
    return folder


def _place(place: Place) -> Hands:
    """Repositories, workspace, host, token, and the request of an ordinary creation."""
    place.data.mkdir(parents=True)
    source = _repository(place.root / "repo")
    _repository(place.root / "second")
    hands = Hands(place)
    Ledger(place.url).install_history()
    place.workspace_id = workspaces.create_workspace(hands.database, "w")
    place.token = access.create_token(hands.database, place.workspace_id, name="t").token
    with hands.database.transaction("test.host") as connection:
        hosts.seen(connection, hands.database, HOST, "test", f"onceborn.host.{HOST}")
    place.body = {
        "title": "a task",
        "repositories": [{"source": str(source)}],
        "profile": "marker",
        "start_agent": True,
    }
    return hands


def _earlier(hands: Hands, *sources: str) -> None:
    """A task of before, complete: the clones are there, others' work will be in them."""
    place = hands.place
    body, place.body = (
        place.body,
        {
            "title": "earlier",
            "external_id": "earlier",
            "repositories": [{"source": str(place.root / name)} for name in sources],
        },
    )
    owned = hands.create()
    assert owned is not None
    assert hands.drive(owned) == "completed"
    place.body = body


def _cut_off(hands: Hands, point: str, nth: int = 1) -> None:
    """A first owner gets as far as a boundary, and no further."""
    hits = 0

    def watch(name: str) -> None:
        nonlocal hits
        hits += name == point
        if hits == nth:
            failpoints.watch(None)
            raise _CutOff()

    failpoints.watch(watch)
    try:
        hands.first()
    except _CutOff:
        return
    finally:
        failpoints.watch(None)
    raise AssertionError(f"{point} was not reached")


def _fresh(place: Place) -> Bystanders:
    _place(place)
    return plant(place.data)


def _half_a_clone(place: Place) -> Bystanders:
    hands = _place(place)
    _cut_off(hands, "clone.whole")
    return plant(place.data)


def _half_a_worktree(place: Place) -> Bystanders:
    hands = _place(place)
    _earlier(hands, "repo")
    others = plant(place.data)
    _cut_off(hands, "worktree.added")
    evidence = Ledger(place.url).rows("SELECT * FROM steps WHERE state = 'running'")
    path = place.data / json.loads(evidence[0]["request"])["path"]
    # Git died in the middle: the record has no index yet, and files are missing.
    (path / "file.txt").unlink()
    admin = Path((path / ".git").read_text().removeprefix("gitdir:").strip())
    (admin / "index").unlink()
    return others


def _completing(place: Place) -> Bystanders:
    hands = _place(place)
    _earlier(hands, "repo")
    others = plant(place.data)
    _cut_off(hands, "complete.enter.committed")
    return others


def _launching(place: Place) -> Bystanders:
    hands = _place(place)
    others = plant(place.data)
    _cut_off(hands, "agent.spawn")
    return others


def _conflict(place: Place) -> Bystanders:
    """The last of two worktrees fails for good: its branch is somebody's."""
    hands = _place(place)
    _earlier(hands, "repo", "second")
    others = plant(place.data)
    place.body = {
        "title": "a task",
        "repositories": [
            {"source": str(place.root / "repo")},
            {"source": str(place.root / "second"), "branch": "someone/idle"},
        ],
    }
    _until(hands, rules.RequireUndo)
    return others


def _deleted(
    place: Place,
    *,
    prepare: Callable[[Path], Any] | None = None,
    spoil: Callable[[Path], Any] | None = None,
) -> Bystanders:
    """Every effect is there when the task is deleted."""
    hands = _place(place)
    if prepare is not None:
        prepare(place.root)
    _earlier(hands, "repo")
    others = plant(place.data)
    _until(hands, rules.EnterCompletion)
    ledger = Ledger(place.url)
    ledger.execute("UPDATE operations SET deleted = true WHERE state = 'preparing'")
    if spoil is not None:
        step = ledger.rows(
            "SELECT s.request FROM steps s JOIN operations o ON o.id = s.operation_id"
            " WHERE s.kind = 'worktree' AND o.deleted"
        )[0]
        spoil(place.data / json.loads(step["request"])["path"])
    return others


def _dirty(place: Place) -> Bystanders:
    """Somebody works in the worktree already."""
    return _deleted(place, spoil=lambda path: (path / "draft.txt").write_text("work\n"))


def _submodule(place: Place) -> Bystanders:
    """The worktree has an initialised submodule, which plain git refuses to remove."""

    def add(root: Path) -> None:
        git("submodule", "add", "-q", root / "second", "sub", cwd=root / "repo")
        git("commit", "-q", "-m", "submodule", cwd=root / "repo")

    return _deleted(
        place,
        prepare=add,
        spoil=lambda path: git("submodule", "update", "--init", "-q", cwd=path),
    )


def _until(hands: Hands, action: type[Any]) -> None:
    owned = hands.create()
    assert owned is not None
    assert hands.drive(owned, until=action) == "reached"


SCENES = [
    Scene("fresh", "first", "completed", _fresh),
    Scene("half a clone", "recovery", "completed", _half_a_clone),
    Scene("half a worktree", "recovery", "completed", _half_a_worktree),
    Scene("between A and B", "recovery", "completed", _completing),
    Scene("before the launch", "recovery", "completed", _launching),
    Scene("a branch is taken", "compensation", "aborted", _conflict),
    Scene("deleted", "compensation", "aborted", _deleted),
    Scene("deleted, with work", "compensation", "aborted", _dirty),
    Scene("deleted, with submodule", "compensation", "aborted", _submodule),
]
