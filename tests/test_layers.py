"""The arrows of the house run only down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
BASE = {"failpoints", "ids", "text"}
"""Modules of the runtime that stand beside the protocol: no verbs, and used by every room."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("onceborn", cache_dir=None)


def test_the_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_protocol_and_ledger_import_no_verb(graph: grimp.ImportGraph) -> None:
    verbs = {
        module
        for module in graph.find_children("onceborn.runtime")
        if module.rpartition(".")[2] not in {"protocol", "ledger", *BASE}
    }
    assert "onceborn.runtime.admission" in verbs
    for room in ("protocol", "ledger"):
        package = f"onceborn.runtime.{room}"
        for module in sorted({package} | graph.find_descendants(package)):
            imported = graph.find_modules_directly_imported_by(module)
            assert not imported & verbs, f"{module} imports {sorted(imported & verbs)}"


def test_the_base_imports_neither_verb_nor_ledger(graph: grimp.ImportGraph) -> None:
    for name in BASE & {m.rpartition(".")[2] for m in graph.find_children("onceborn.runtime")}:
        imported = graph.find_modules_directly_imported_by(f"onceborn.runtime.{name}")
        above = [m for m in imported if not m.startswith("onceborn.runtime.protocol")]
        assert not above, f"{name} imports {above}"


def test_no_two_modules_import_each_other(graph: grimp.ImportGraph) -> None:
    for module in sorted(graph.modules):
        for imported in graph.find_modules_directly_imported_by(module):
            assert not graph.direct_import_exists(importer=imported, imported=module), (
                f"{module} and {imported} import each other"
            )
