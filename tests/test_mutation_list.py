"""The list of mutations (tools/mutations) stays true to the code: ``make mutations`` runs it."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutations_tool", ROOT / "tools" / "mutations.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutations_tool"] = module
    spec.loader.exec_module(module)
    return module


TOOL = _tool()
LISTED = TOOL.listed()

LAWS = {
    # Named by design 6-quality; those of release and freeze come with their issues.
    "the fence out of a WHERE": "hold-without-the-fence",
    "the token out of a WHERE": "write-without-the-token",
    "the token check under the host lock": "guard-asks-nothing",
    "lookup after validation": "lookup-after-validation",
    "no re-read after a failure": "no-reread-after-a-failure",
    "check-then-insert": "check-then-insert",
    "re-read in the same statement": "reread-in-the-same-statement",
    "Complete without the evidence hash": "complete-without-the-evidence-hash",
    "Abort with an unknown step": "abort-with-an-unknown-step",
    "event outside the transaction": "event-outside-the-transaction",
    "observe outside the lock": "observe-outside-the-lock",
    "row count ignored": "hold-ignores-its-row-count",
    "index without its predicate": "index-without-its-predicate",
    "collation left to the database": "collation-left-to-the-database",
    "lock not inherited by children": "lock-not-inherited",
}


@pytest.mark.parametrize("mutation", LISTED, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_what_is_there_exactly_once(mutation: object) -> None:
    for path, text in TOOL.mutated(ROOT, mutation).items():
        assert text != path.read_text()
        ast.parse(text)  # a mutation that does not compile shows nothing


@pytest.mark.parametrize("mutation", LISTED, ids=lambda mutation: mutation.name)
def test_the_tests_that_it_names_exist(mutation: object) -> None:
    for test in mutation.tests:  # type: ignore[attr-defined]
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text()
        assert not name or f"def {name}(" in source, test


def test_names_are_distinct_and_every_law_has_its_mutation() -> None:
    names = [mutation.name for mutation in LISTED]
    assert len(names) == len(set(names))
    assert set(LAWS.values()) <= set(names)


def test_a_text_that_is_not_there_exactly_once_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old in ("x = 1", "y = 1"):
        change = TOOL.Change("a.py", old, "x = 2")
        mutation = TOOL.Mutation("name", "law", (change,), (), "sqlite")
        with pytest.raises(ValueError, match="times in"):
            TOOL.mutated(tmp_path, mutation)
    change = TOOL.Change("a.py", "x = 1\nx", "y = 2\nx")
    with TOOL.applied(tmp_path, TOOL.Mutation("name", "law", (change,), (), "sqlite")):
        assert (tmp_path / "a.py").read_text() == "y = 2\nx = 1\n"
    assert (tmp_path / "a.py").read_text() == "x = 1\nx = 1\n"
