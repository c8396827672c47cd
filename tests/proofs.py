"""Which test proves what: ``@pytest.mark.proves("C01", "SA03")``, checked and listed.

Every ID must stand in ids.txt, else nothing runs. ``pytest --collect-only --proofs`` (``make
proofs``) prints, for each ID, the tests that prove it and on which database, and which have none.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

BACKENDS = ("sqlite", "postgresql")
Proofs = dict[str, dict[str, set[str]]]
"""ID -> test -> databases that it runs on (none: it needs none)."""

_found = pytest.StashKey[Proofs]()


def known_ids() -> list[str]:
    """All IDs of scenarios and cases, sorted."""
    lines = Path(__file__).with_name("ids.txt").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proofs", action="store_true", help="list which test proves which ID")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = set(known_ids())
    proofs: Proofs = defaultdict(dict)
    unknown: list[str] = []
    for item in items:
        for mark in item.iter_markers("proves"):
            if not mark.args or mark.kwargs:
                unknown.append(f"{item.nodeid}: proves() takes IDs")
            for identifier in mark.args:
                if identifier not in known:
                    unknown.append(f"{item.nodeid}: {identifier!r} is no known ID")
                databases = proofs[identifier].setdefault(_test_name(item), set())
                databases.update(_backend_of(item))
    if unknown:
        raise pytest.UsageError("\n".join(unknown))
    config.stash[_found] = proofs


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not config.getoption("--proofs"):
        return
    proofs = config.stash.get(_found, {})
    terminalreporter.section("proofs")
    missing = []
    for identifier in known_ids():
        tests = proofs.get(identifier)
        if not tests:
            missing.append(identifier)
            continue
        for test, databases in sorted(tests.items()):
            on = ", ".join(name for name in BACKENDS if name in databases) or "no database"
            terminalreporter.write_line(f"{identifier:5} {test}  [{on}]")
    proven = len(known_ids()) - len(missing)
    terminalreporter.write_line("")
    terminalreporter.write_line(f"{proven} of {len(known_ids())} proven; without a test:")
    for start in range(0, len(missing), 16):
        terminalreporter.write_line("  " + " ".join(missing[start : start + 16]))


def _test_name(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _backend_of(item: pytest.Item) -> set[str]:
    callspec = getattr(item, "callspec", None)
    values = [] if callspec is None else list(callspec.params.values())
    return {value for value in values if isinstance(value, str) and value in BACKENDS}
