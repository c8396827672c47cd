"""The host kinds over the world in memory. They keep the contract of ``activities.kind``.

They look before they act, ask the guard before every child, and never touch what is not theirs; how
they fail, half do, or misreport is what the schedule says.
"""

from __future__ import annotations

from typing import Any, Final

from onceborn.activities.kind import (
    Absent,
    Compensated,
    Conflict,
    Observation,
    OursHalfMade,
    Present,
    Step,
    StepFailed,
    StepRetry,
    Transferred,
    Undetermined,
    Undone,
    World,
)
from onceborn.runtime.failpoints import failpoint
from onceborn.runtime.ids import new_id
from onceborn.runtime.ledger import attachments
from onceborn.runtime.ledger.attachments import Attachment
from onceborn.runtime.protocol.evidence import RepoAttached, WorktreeMade
from onceborn.runtime.protocol.plan import RepoAttachRequest, WorktreeRequest

from .world import FOREIGN, FakeWorld, Place

BASE: Final = "c0ffee" + "0" * 34


class FakeKind:
    """What both have in common: the lies."""

    name = ""

    def __init__(self, fake: FakeWorld) -> None:
        self.fake = fake

    def resource(self, step: Step[Any]) -> str:
        raise NotImplementedError

    def _look(self, step: Step[Any]) -> Undetermined | None:
        failpoint("fake.look")
        if not self.fake.locks.mine(self.resource(step)):
            self.fake.wrong.append(f"{step.key} is looked at without its lock")
        if self.fake.blind[step.key] > 0:
            self.fake.blind[step.key] -= 1
            return Undetermined("it is too dark to see")
        return None

    def _lie(self, step: Step[Any]) -> str:
        lies = self.fake.lies[step.key]
        return lies.popleft() if lies else ""


def misreport(lie: str) -> None:
    """How an act that did what it did is told of."""
    if lie.endswith("_retry"):
        raise StepRetry("fake.retry", "it did not work, it says")
    if lie.endswith("_failed"):
        raise StepFailed("fake.failed", "it can never work, it says")
    if lie.endswith("_error"):
        raise OSError("the disk is full, it says")


class FakeAttach(FakeKind):
    """``repo_attach``: a clone that all share, and our row."""

    name = "repo_attach"

    def resource(self, step: Step[RepoAttachRequest]) -> str:
        return f"clone/{step.request.clone}"

    def observe(self, step: Step[RepoAttachRequest], world: World) -> Observation:
        dark = self._look(step)
        if dark is not None:
            return dark
        row = self._row(step, world)
        if row is None:
            return Absent({"attachment": None})
        if row.ownership_key != step.idempotency_key:
            return Conflict("repository.attached_otherwise", "another step's")
        if not self.fake.clones.get(step.request.clone):
            return OursHalfMade({"attachment": row.id})
        return Present(
            RepoAttached(
                repository=row.repository,
                clone=f"/host/{step.request.clone}",
                base_ref=row.base_ref,
                base_commit=row.base_commit,
                resolved_by="remote_head",
                attachment_id=row.id,
            )
        )

    def perform(self, step: Step[RepoAttachRequest], world: World) -> None:
        lie = self._lie(step)
        clone = step.request.clone
        if not lie.startswith("nothing") and not self.fake.clones.get(clone):

            def begin() -> None:
                self.fake.clones[clone] = False

            def end() -> None:
                self.fake.clones[clone] = True

            self.fake.guarded(step.idempotency_key, world.guard)
            stages = [begin] if lie.startswith("half") else [begin, end]
            self.fake.run(self.resource(step), step.idempotency_key, *stages)
        if not lie.startswith(("nothing", "half")):
            request = step.request
            with world.transaction() as connection:
                attachments.remove(
                    connection, step.operation_id, request.repository, step.idempotency_key
                )
                attachments.add(connection, world.database, self._attachment(step))
        misreport(lie)

    def compensate(self, step: Step[RepoAttachRequest], world: World) -> Undone:
        dark = self._look(step)
        if dark is not None:
            return dark
        misreport(self._lie(step))
        row = self._row(step, world)
        removed = False
        if row is not None and row.ownership_key == step.idempotency_key:
            with world.transaction() as connection:
                removed = attachments.remove(
                    connection, step.operation_id, step.request.repository, step.idempotency_key
                )
        return Compensated({"attachment": None, "removed": removed})

    def _row(self, step: Step[RepoAttachRequest], world: World) -> Attachment | None:
        with world.database.reading() as connection:
            return attachments.find(connection, step.operation_id, step.request.repository)

    def _attachment(self, step: Step[RepoAttachRequest]) -> Attachment:
        return Attachment(
            id=new_id("att"),
            operation_id=step.operation_id,
            task_id=step.task_id,
            repository=step.request.repository,
            source=step.request.source,
            clone=step.request.clone,
            base_ref="refs/heads/trunk",
            base_commit=BASE,
            resolved_by="remote_head",
            ownership_key=step.idempotency_key,
        )


class FakeWorktree(FakeKind):
    """``worktree``: a branch with our key, and a folder that is filled in a second stage."""

    name = "worktree"

    def resource(self, step: Step[WorktreeRequest]) -> str:
        return f"worktree/{step.request.path}"

    def observe(self, step: Step[WorktreeRequest], world: World) -> Observation:
        dark = self._look(step)
        if dark is not None:
            return dark
        place, key = self.fake.places[step.request.path], step.idempotency_key
        if place.branch == key == place.folder and place.full:
            return Present(evidence_of(step))
        if key in (place.branch, place.folder):
            return OursHalfMade({"branch": place.branch, "folder": place.folder})
        if FOREIGN in (place.branch, place.folder):
            return Conflict("worktree.path_exists", "somebody else's")
        return Absent({"branch": None, "folder": None})

    def perform(self, step: Step[WorktreeRequest], world: World) -> None:
        lie = self._lie(step)
        place, key = self.fake.places[step.request.path], step.idempotency_key
        if FOREIGN in (place.branch, place.folder):
            raise StepFailed("worktree.path_exists", "somebody else's")
        stages = []
        if place.branch is None:
            stages.append(lambda: self._make_branch(place, key))
        if place.folder is None:
            stages.append(lambda: self._make_folder(place, key))
        if not place.full:
            stages.append(lambda: self._fill(place, key))
        if lie.startswith("nothing"):
            stages = []
        elif lie.startswith("half"):
            stages = stages[:-1]
        if stages:
            world.heartbeat()
            self.fake.guarded(key, world.guard)
            self.fake.run(self.resource(step), key, *stages)
        misreport(lie)

    def compensate(self, step: Step[WorktreeRequest], world: World) -> Undone:
        dark = self._look(step)
        if dark is not None:
            return dark
        lie = self._lie(step)
        if lie.startswith("nothing"):
            misreport(lie)
            return Undetermined("it would not go")
        place, key = self.fake.places[step.request.path], step.idempotency_key
        ours = key in (place.branch, place.folder)
        if place.full and place.folder == key and place.work:
            return Transferred({"kept": step.request.path, "ownership_key": key})
        if ours:
            self.fake.guarded(key, world.guard)
            stages = [
                lambda: self._remove_folder(place, key),
                lambda: self._remove_branch(place, key),
            ]
            self.fake.run(self.resource(step), key, *stages)
            if key in (place.branch, place.folder):
                return Undetermined("somebody has worked in it since it was looked at")
        misreport(lie)
        kept = self.fake.quarantine[key]
        proof = {"ownership_key": key, "quarantined": list(kept)}
        return Transferred(proof) if kept else Compensated(proof)

    # -- what a child does --------------------------------------------------------------------

    def _make_branch(self, place: Place, key: str) -> None:
        if place.branch is not None:
            raise StepRetry("worktree.git_failed", "the branch exists")
        place.branch = key

    def _make_folder(self, place: Place, key: str) -> None:
        if place.folder is not None:
            raise StepRetry("worktree.git_failed", "the folder exists")
        place.folder = key

    def _fill(self, place: Place, key: str) -> None:
        if place.folder != key or place.branch != key:
            raise StepRetry("worktree.git_failed", "there is nothing to fill")
        if place.full:
            self.fake.wrong.append(f"{key[:8]} is made twice")
        place.full = True

    def _remove_folder(self, place: Place, key: str) -> None:
        if place.folder != key:
            return
        if place.work and place.full:
            raise StepRetry("worktree.git_failed", "it holds changes")
        if place.work:
            self.fake.quarantine[key].append(f"work of {key[:8]}")
        place.folder, place.full, place.work = None, False, False

    def _remove_branch(self, place: Place, key: str) -> None:
        if place.branch == key:
            place.branch = None


def evidence_of(step: Step[WorktreeRequest]) -> WorktreeMade:
    """What a look at a whole worktree shows."""
    request = step.request
    return WorktreeMade(
        repository=request.repository,
        path=f"/host/{request.path}",
        branch=request.branch,
        base_commit=BASE,
        head=f"refs/heads/{request.branch}",
        registration=f"/host/{request.clone}/worktrees/x",
        ownership_key=step.idempotency_key,
    )


def fake_kinds(fake: FakeWorld) -> dict[str, Any]:
    """In place of ``registry.HOST_KINDS``."""
    return {kind.name: kind for kind in (FakeAttach(fake), FakeWorktree(fake))}
