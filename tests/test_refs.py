"""What callers may name reaches git and the file system only if it is harmless."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceborn.runtime.ids import new_id
from onceborn.runtime.protocol.errors import InvalidField
from onceborn.runtime.protocol.refs import (
    check_branch,
    check_ref,
    check_source,
    default_branch_name,
    is_commit,
    is_local_source,
    slug,
)

GOOD_REFS = [
    "main",
    "release/2026.4",
    "v1.0",
    "feature/a-b_c",
    "\u0432\u0435\u0442\u043a\u0430",
    "a@b",
    "x" * 200,
    "0123456789abcdef0123456789abcdef01234567",
]
BAD_REFS = [
    "",
    "--orphan",
    "--lock",
    "-x",
    "a/-b",
    "-",
    "a b",
    "a..b",
    "a~1",
    "a^",
    "a:b",
    "a?",
    "a*",
    "a[b",
    "a\\b",
    "a@{1}",
    "@",
    "/a",
    "a/",
    "a//b",
    "a.",
    ".a",
    "a/.b",
    "a.lock",
    "a.lock/b",
    "a\x00b",
    "a\nb",
    "a\x7f",
    "\ud800",
    "x" * 201,
]
GOOD_SOURCES = [
    "/srv/repositories/one",
    "/srv/with space/\u0440\u0435\u043f\u043e",
    "https://example.invalid/a/b.git",
    "https://example.invalid:8443/a",
    "ssh://git@example.invalid/a.git",
    "git://example.invalid/a",
    "git@example.invalid:a/b.git",
]
BAD_SOURCES = [
    "",
    "-oProxyCommand=x",
    "--upload-pack=x",
    "ext::sh -c x",
    "fd::17",
    "https://example.invalid/a::b",
    "relative/path",
    "../up",
    "/srv/../etc",
    "file:///srv/one",
    "ftp://example.invalid/a",
    "https:///nohost",
    "https://-x/a",
    "ssh://-oProxyCommand=x/a",
    "ssh://-x@example.invalid/a",
    "-x@example.invalid:a",
    "https://user:secret@example.invalid/a",
    "https://secret@example.invalid/a",
    "ssh://git:secret@example.invalid/a",
    "https://[broken/a",
    "/a\nb",
    "/a\x00b",
    "/\udfff",
    "/" + "x" * 2048,
]


@pytest.mark.proves("SA13")
@pytest.mark.parametrize("value", BAD_REFS)
def test_a_bad_reference_is_refused_by_name(value: str) -> None:
    for check in (check_ref, check_branch):
        with pytest.raises(InvalidField) as caught:
            check(value, "repositories.0.base_ref")
        assert caught.value.field == "repositories.0.base_ref"
        assert "repositories.0.base_ref" in caught.value.message
        assert caught.value.http_status == 400


@pytest.mark.parametrize("value", GOOD_REFS)
def test_a_good_reference_is_kept_as_it_is(value: str) -> None:
    assert check_ref(value, "base_ref") == value


@pytest.mark.parametrize(
    "value", ["HEAD", "refs/heads/main", "0123456789abcdef0123456789abcdef01234567", "f" * 64]
)
def test_a_branch_has_a_plain_name(value: str) -> None:
    with pytest.raises(InvalidField, match="plain branch name"):
        check_branch(value, "branch")


@given(st.text(max_size=30))
def test_no_accepted_branch_is_refused_by_git(value: str) -> None:
    try:
        check_branch(value, "branch")
    except InvalidField:
        return
    done = subprocess.run(["git", "check-ref-format", "--branch", value], capture_output=True)
    assert done.returncode == 0, value


@pytest.mark.proves("SA13")
@pytest.mark.parametrize("value", BAD_SOURCES)
def test_a_bad_address_is_refused_without_repeating_it(value: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_source(value, "repositories.0.source")
    assert caught.value.field == "repositories.0.source"
    assert "secret" not in caught.value.message
    assert len(value) < 3 or value not in caught.value.message


@pytest.mark.parametrize("value", GOOD_SOURCES)
def test_a_good_address_is_kept_as_it_is(value: str) -> None:
    assert check_source(value, "source") == value
    assert is_local_source(value) == value.startswith("/")


@pytest.mark.proves("SA12")
@pytest.mark.parametrize(
    ("title", "readable"),
    [
        ("Fix the login page", "fix-the-login-page"),
        ("x" * 300, "x" * 40),
        ("word " * 60, "word-word-word-word-word-word-word-word"),
        ("\U0001f600\U0001f680", "task"),
        ("...!?///", "task"),
        ("\u041a\u0438\u0440\u0438\u043b\u043b\u0438\u0446\u0430", "task"),
        ("Caf\u00e9 \u2014 r\u00e9sum\u00e9", "cafe-resume"),
        ("--orphan", "orphan"),
        ("../../etc/passwd", "etc-passwd"),
        ("a.lock", "a-lock"),
        ("\ud800", "task"),
    ],
)
def test_any_title_gives_a_bounded_readable_name(title: str, readable: str) -> None:
    assert slug(title) == readable
    assert check_branch(default_branch_name(title, new_id("tsk")), "branch")


@pytest.mark.proves("SA12")
def test_names_of_distinct_tasks_are_distinct_whatever_their_titles() -> None:
    titles = ["\U0001f600", "\U0001f680", "!!!", "Same", "Same", "same", "x" * 300, "x" * 301]
    names = [default_branch_name(title, new_id("tsk")) for title in titles for _ in range(50)]
    assert len(set(names)) == len(names)


@given(st.text(max_size=300))
def test_every_title_makes_a_branch_that_git_takes(title: str) -> None:
    name = default_branch_name(title, "tsk_0123456789ab0123456789abcdef01234567")
    assert check_branch(name, "branch") == name
    assert len(name.encode()) <= 80
    assert name.isascii()


def test_a_commit_is_a_full_lower_case_id() -> None:
    assert is_commit("a" * 40)
    assert is_commit("0" * 64)
    assert not any(is_commit(value) for value in ("a" * 39, "A" * 40, "g" * 40, "a" * 41, ""))
