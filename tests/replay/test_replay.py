"""Workflows that a release left in flight go on under this code: recorded histories, replayed.

The histories are real ones (tools/record_histories.py). They are replayed as a worker would, in the
default sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from changed_workflow import ChangedWorkflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from onceborn.runtime.protocol.plan import LONG_KINDS, ROW_ONLY_KINDS
from onceborn.workflows.worker import WORKFLOWS

HISTORIES = Path(__file__).parent / "histories"
RECORDED = sorted(path.stem for path in HISTORIES.glob("*.json"))

EXPECTED = {
    "creation": {
        "straight", "of_nothing", "with_retry", "with_failed_activities", "aborted", "recovered",
        "fence_lost", "busy", "released", "parked",
    },
    "run": {"straight", "not_launched", "unwanted", "cancelled"},
}  # fmt: skip

WHAT_TO_DO = """\
{name}: this code does not replay what an earlier one recorded:

{error}

A workflow in flight would fail at its next task when this is released. None would be lost (the
sweep gives each a new owner under the next fence), but each would wait for its lease, and spend one
claim of its progress budget. Keep the old order of commands for them, with `workflow.patched`, and
record the new order under another name. Only where no release has ever run the recorded code:

    .venv/bin/python tools/record_histories.py {name}
"""


def load(name: str) -> WorkflowHistory:
    document = json.loads((HISTORIES / f"{name}.json").read_text())
    return WorkflowHistory.from_json(document.pop("workflow_id"), document)


def replay(name: str, *workflows: type[Any]) -> None:
    asyncio.run(Replayer(workflows=workflows).replay_workflow(load(name)))


@pytest.mark.proves("SC09")
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_history_is_replayed(name: str) -> None:
    try:
        replay(name, *WORKFLOWS)
    except Exception as error:
        pytest.fail(WHAT_TO_DO.format(name=name, error=error), pytrace=False)


def test_every_way_that_a_workflow_can_go_is_recorded() -> None:
    wanted = {f"{prefix}_{name}" for prefix, names in EXPECTED.items() for name in names}
    missing = wanted - set(RECORDED)
    assert not missing, f"record them with tools/record_histories.py: {sorted(missing)}"


def activities(name: str) -> list[str]:
    """The activities of a history in order, local ones too."""
    found = []
    for event in json.loads((HISTORIES / f"{name}.json").read_text())["events"]:
        scheduled = event.get("activityTaskScheduledEventAttributes")
        if scheduled:
            found.append(scheduled["activityType"]["name"])
        marker = event.get("markerRecordedEventAttributes")
        if marker:
            data = marker["details"]["data"]["payloads"][0]["data"]
            found.append(json.loads(base64.b64decode(data))["activity_type"])
    return found


def test_the_recordings_show_what_their_names_say() -> None:
    straight = activities("creation_straight")
    for kind in ROW_ONLY_KINDS | LONG_KINDS | {"worktree"}:
        assert f"perform_{kind}" in straight
    assert straight[-1] == "dispatch_run"
    assert activities("creation_aborted")[-1] == "abort"
    assert "compensate_worktree" in activities("creation_aborted")
    assert "resolve_worktree" in activities("creation_recovered")
    assert "finish_release" in activities("creation_released")
    assert activities("creation_with_retry").count("perform_repo_attach") == 2
    assert activities("run_not_launched").count("run_launch") == 3


@pytest.mark.proves("SC09")
def test_a_change_that_breaks_what_is_in_flight_is_noticed() -> None:
    with pytest.raises(Exception, match=r"(?i)nondeterminism"):
        replay("creation_straight", ChangedWorkflow)


def test_nothing_of_the_recording_machine_is_kept() -> None:
    for name in RECORDED:
        text = (HISTORIES / f"{name}.json").read_text()
        for word in text.split('"'):
            decoded = word
            if len(word) > 40:
                try:
                    decoded = base64.b64decode(word, validate=True).decode()
                except ValueError:
                    continue
            assert "onceborn-record" not in decoded
