"""Canonical bytes are those of RFC 8785; a hash says what it is of."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceborn.runtime.protocol.canonical import (
    Domain,
    canonical_bytes,
    canonical_text,
    digest,
    digest_bytes,
)

# RFC 8785, section 3.2.2 and 3.2.3, and its appendix B.
RFC_INPUT = r"""{
  "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
  "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
  "literals": [null, true, false]
}"""
RFC_OUTPUT = (
    '{"literals":[null,true,false],'
    '"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
    '"string":"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
)
RFC_SORTING = {
    "\u20ac": "Euro Sign",
    "\r": "Carriage Return",
    "\ufb33": "Hebrew Letter Dalet With Dagesh",
    "1": "One",
    "\U0001f600": "Emoji: Grinning Face",
    "\u0080": "Control",
    "\u00f6": "Latin Small Letter O With Diaeresis",
}
RFC_SORTED = ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
RFC_NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}


def test_the_rfcs_example() -> None:
    assert canonical_text(json.loads(RFC_INPUT)) == RFC_OUTPUT
    assert canonical_bytes(json.loads(RFC_INPUT)) == RFC_OUTPUT.encode()


def test_keys_are_sorted_by_utf16_code_units() -> None:
    assert list(json.loads(canonical_bytes(RFC_SORTING))) == RFC_SORTED


@pytest.mark.parametrize("bits", RFC_NUMBERS)
def test_the_rfcs_numbers(bits: str) -> None:
    import struct

    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_text(number) == RFC_NUMBERS[bits]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 2**53, -(2**53)])
def test_numbers_that_json_cannot_carry_exactly_are_refused(number: float) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        canonical_bytes({"n": number})


def test_order_of_keys_and_form_of_numbers_say_nothing() -> None:
    one = {"a": 1, "b": [1.0, {"y": 0, "x": -0.0}]}
    other = {"b": [1, {"x": 0, "y": 0.0}], "a": 1.0}
    assert digest(Domain.MANIFEST, one) == digest(Domain.MANIFEST, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, "1"), ([1, 2], [2, 1]), ({"a": None}, {}), (True, 1), ("\u00e9", "e\u0301")],
)
def test_different_values_have_different_hashes(one: Any, other: Any) -> None:
    assert digest(Domain.MANIFEST, one) != digest(Domain.MANIFEST, other)


def test_a_hash_is_of_domain_zero_byte_and_bytes() -> None:
    expected = hashlib.sha256(b'onceborn.plan.v1\x00{"a":1}').hexdigest()
    assert digest(Domain.PLAN, {"a": 1.0}) == expected
    assert digest_bytes(Domain.PLAN, b'{"a":1}') == expected


def test_no_two_domains_give_one_hash() -> None:
    assert len({digest(domain, {"a": 1}) for domain in Domain}) == len(Domain)
    names = [domain.value for domain in Domain]
    assert all(name.isascii() and "\x00" not in name for name in names)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


@given(JSON)
def test_canonical_text_reads_back_to_itself(document: Any) -> None:
    text = canonical_text(document)
    # RFC 8785 numbers are doubles; the shortest digits of a large one read as an integer.
    again = json.loads(text, parse_int=float)
    assert canonical_text(again) == text
