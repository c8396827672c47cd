"""The external ID's rule (design 1-protocol, 'Identity')."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceborn.runtime.protocol.errors import InvalidExternalId
from onceborn.runtime.protocol.identity import MAX_EXTERNAL_ID_BYTES, normalize_external_id

CONTROLS = [*range(0x20), 0x7F]
# PropList.txt of Unicode: White_Space, without the control characters U+0009 to U+000D, which the
# rule refuses before it trims.
WHITE_SPACE = [
    0x20,
    0x85,
    0xA0,
    0x1680,
    *range(0x2000, 0x200B),
    0x2028,
    0x2029,
    0x202F,
    0x205F,
    0x3000,
]


def _refused(value: object) -> InvalidExternalId:
    with pytest.raises(InvalidExternalId) as caught:
        normalize_external_id(value)
    assert caught.value.field == "external_id"
    assert caught.value.http_status == 400
    return caught.value


@pytest.mark.proves("V01")
@pytest.mark.parametrize("letter", ["a", "\u00e9", "\u20ac", "\U0001f600"])
def test_255_bytes_are_accepted_and_256_refused(letter: str) -> None:
    size = len(letter.encode())
    fits = letter * (MAX_EXTERNAL_ID_BYTES // size)
    fits += "a" * (MAX_EXTERNAL_ID_BYTES - len(fits.encode()))
    assert len(fits.encode()) == 255
    assert normalize_external_id(fits) == fits
    assert _refused(fits + "a").fields["limit"] == 255
    # One character more that crosses the boundary in its middle.
    _refused(fits[:-1] + letter + "a")


@pytest.mark.proves("V01")
def test_bytes_are_counted_after_trimming() -> None:
    assert normalize_external_id("\u3000" * 100 + "a" * 255 + " " * 100) == "a" * 255
    _refused("\u3000" * 100 + "a" * 256)


@pytest.mark.proves("V02")
@pytest.mark.parametrize("code", CONTROLS)
@pytest.mark.parametrize("form", ["{}", "e{}", "{}e", "a{}b", " {} "])
def test_control_characters_are_refused_anywhere(code: int, form: str) -> None:
    _refused(form.format(chr(code)))


@pytest.mark.proves("V02")
@pytest.mark.parametrize("code", WHITE_SPACE)
def test_white_space_is_trimmed_at_both_ends_only(code: int) -> None:
    space = chr(code)
    assert normalize_external_id(f"{space}{space}e{space}f{space}") == f"e{space}f"
    assert normalize_external_id(space * 3) is None


@pytest.mark.proves("V02")
def test_nothing_else_is_trimmed() -> None:
    known = {*WHITE_SPACE, *CONTROLS}
    for code in range(sys.maxunicode + 1):
        if code in known or 0xD800 <= code <= 0xDFFF:
            continue
        assert normalize_external_id(chr(code)) == chr(code), f"U+{code:04X}"


@pytest.mark.proves("V02")
@pytest.mark.parametrize("stays", ["\u200b", "\ufeff", "\u2060", "\u180e", "\u200d"])
def test_invisible_characters_that_are_not_white_space_stay(stays: str) -> None:
    assert normalize_external_id(f"{stays}e{stays}") == f"{stays}e{stays}"


@pytest.mark.proves("V02")
@pytest.mark.parametrize("absent", [None, "", " ", "   ", "\u00a0\u2003", "\u0085"])
def test_empty_is_absent(absent: str | None) -> None:
    assert normalize_external_id(absent) is None


@pytest.mark.proves("V02")
@pytest.mark.parametrize(
    "wrong",
    [0, 1, 1.5, True, False, {}, {"a": 1}, [], ["e"], b"e", "\ud800", "e\udfff", " \ud83d "],
)
def test_what_is_no_text_is_refused(wrong: object) -> None:
    _refused(wrong)


@pytest.mark.proves("V02")
def test_the_error_names_the_field_it_was_told() -> None:
    with pytest.raises(InvalidExternalId) as caught:
        normalize_external_id(7, field="task.external_id")
    assert caught.value.field == "task.external_id"
    assert caught.value.message == "task.external_id must be a string"


@pytest.mark.proves("V02")
def test_case_and_composition_are_kept() -> None:
    composed, decomposed = "caf\u00e9", unicodedata.normalize("NFD", "caf\u00e9")
    assert composed != decomposed
    assert normalize_external_id(composed) == composed
    assert normalize_external_id(decomposed) == decomposed
    assert normalize_external_id("Abc") != normalize_external_id("abc")
    assert normalize_external_id("\ufb01") == "\ufb01"  # a ligature is not spelt out


@given(st.text(max_size=80))
def test_the_rule_may_be_applied_again(value: str) -> None:
    try:
        once = normalize_external_id(value)
    except InvalidExternalId:
        return
    assert normalize_external_id(once) == once
    assert once is None or (once in value and 1 <= len(once.encode()) <= 255)


@pytest.mark.parametrize(
    ("given_value", "held"),
    [("abc", "abc"), ("abc ", "abc"), (" abc", "abc"), ("ABC", "ABC"), (" \u2003 ", None)],
)
def test_the_one_rule_for_every_surface(given_value: str, held: str | None) -> None:
    assert normalize_external_id(given_value) == held
