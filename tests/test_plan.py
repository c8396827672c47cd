"""The manifest's own rules."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from onceborn.runtime.protocol.canonical import Domain, canonical_text, digest
from onceborn.runtime.protocol.plan import MAX_METADATA_BYTES, Manifest


@pytest.mark.parametrize(
    "value", [1e20, -1e16, 2.0**53, 2**53, float("nan"), float("inf"), {"deep": [1e17]}]
)
def test_a_number_that_would_not_read_back_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Manifest(title="t", metadata={"n": value})
    assert caught.value.errors()[0]["loc"][0] == "metadata"


NUMBERS = st.floats() | st.integers()


@given(st.dictionaries(st.text(max_size=4), NUMBERS | st.lists(NUMBERS, max_size=3), max_size=4))
def test_what_is_accepted_has_one_hash_before_and_after_the_ledger(metadata: Any) -> None:
    try:
        manifest = Manifest(title="t", metadata=metadata)
    except ValidationError:
        return
    stored = canonical_text(manifest.model_dump(mode="json"))
    assert digest(Domain.MANIFEST, json.loads(stored)) == manifest.digest()
    assert Manifest.model_validate_json(stored).digest() == manifest.digest()


def test_metadata_is_bounded_in_its_canonical_form() -> None:
    room = MAX_METADATA_BYTES - len(b'{"k":""}')
    assert Manifest(title="t", metadata={"k": "a" * room})
    with pytest.raises(ValidationError, match="at most"):
        Manifest(title="t", metadata={"k": "a" * (room + 1)})
