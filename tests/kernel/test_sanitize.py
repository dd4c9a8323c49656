"""NULs are replaced and everything else is left as it is."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.sanitize import json_without_nul


@given(st.text(alphabet=["\x00", "\\", "u", "0", '"', "é", "x"], max_size=12))
def test_every_nul_is_replaced_and_nothing_else(text: str) -> None:
    assert json.loads(json_without_nul(json.dumps([text]).encode())) == [text.replace("\x00", "\ufffd")]


@pytest.mark.parametrize("value", [{"a\x00": {"b": ["\x00"]}}, "\\u0000", []])
def test_it_looks_into_keys_and_nested_values(value: object) -> None:
    assert "\x00" not in str(json.loads(json_without_nul(json.dumps(value).encode())))
