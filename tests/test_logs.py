"""Logs: one line an event, on stderr, and never a secret."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from onceborn.runtime.protocol.handle import CreationHandle
from onceborn.surfaces.logs import hide_secrets

TOKEN = "onb_" + "a" * 43

PROGRAM = f"""
import logging, structlog
from onceborn.runtime.settings import Settings
from onceborn.surfaces import logs
logs.configure(Settings(log_format="json"))
structlog.get_logger("ours").info("it began", operation="op_1", note="with {TOKEN}")
logging.getLogger("theirs").warning("GET %s", "postgresql://u:hunter2@db/x")
try:
    raise RuntimeError("Authorization: Bearer {TOKEN}")
except RuntimeError:
    structlog.get_logger("ours").exception("it broke")
structlog.get_logger("ours").debug("too quiet")
"""


@pytest.mark.proves("U08")
def test_every_line_is_json_on_stderr_without_secrets() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == [
        "it began",
        "GET postgresql://[hidden]@db/x",
        "it broke",
    ]
    assert (lines[0]["operation"], lines[0]["level"], lines[0]["logger"]) == (
        "op_1",
        "info",
        "ours",
    )
    assert "RuntimeError" in lines[2]["exception"]
    assert TOKEN not in done.stderr
    assert "hunter2" not in done.stderr


@pytest.mark.proves("U08")
@pytest.mark.parametrize(
    "value",
    [
        TOKEN,
        f"x {TOKEN} y",
        {"deep": [{"authorization": "Basic abc"}, (TOKEN,)]},
        {"completion_token": "abc"},
        b"abc",
        CreationHandle("op", "tsk", "wsp", b"abc", "a", "m", "p"),
        RuntimeError(TOKEN),
    ],
)
def test_secrets_are_hidden_at_any_depth(value: object) -> None:
    shown = repr(hide_secrets(None, "info", {"event": "e", "field": value}))
    assert "[hidden]" in shown
    assert TOKEN not in shown
    assert "abc" not in shown


def test_what_is_no_secret_stays() -> None:
    event = {"event": "e", "path": "/a/b", "count": 3, "ok": None, "url": "http://h:80/x"}
    assert hide_secrets(None, "info", dict(event)) == event
