"""What is generated or promised in files is current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_state_diagrams_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "tools/states_diagram.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_requirements_are_locked_by_hash_and_name_no_index() -> None:
    files = sorted((ROOT / "requirements").glob("*.txt"))
    assert [file.name for file in files] == ["dev.txt", "runtime.txt"]
    for file in files:
        text = file.read_text("utf-8")
        for forbidden in ("://", "--index-url", "--extra-index-url", "--find-links", "--trusted"):
            assert forbidden not in text, f"{file.name} holds {forbidden}"
        pinned = re.split(r"\n(?=[A-Za-z0-9])", text.strip())
        for requirement in pinned:
            name = requirement.split(maxsplit=1)[0]
            assert "==" in name, f"{file.name}: {name} is not pinned"
            assert "--hash=sha256:" in requirement, f"{file.name}: {name} has no hash"
            # A direct address would stand after an '@'.
            assert " @ " not in requirement, f"{file.name}: {name} names an address"


def test_the_runtime_lock_is_part_of_the_development_lock() -> None:
    def pins(name: str) -> set[str]:
        text = (ROOT / "requirements" / name).read_text("utf-8")
        return set(re.findall(r"^[A-Za-z0-9._-]+==\S+", text, re.MULTILINE))

    assert pins("runtime.txt")
    assert pins("runtime.txt") <= pins("dev.txt")
