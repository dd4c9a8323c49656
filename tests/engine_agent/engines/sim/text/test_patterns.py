"""Texts that match an expression."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.sim.text.patterns import BadPattern, matching_text

LITERALS = st.sampled_from(
    ["a", "-", "\\.", "\\d", "\\w", "\\s", "\\S", ".", "[a-f0-9_]", "[^a-z]", "\\n", "[]x]", "é"]
)
REPEATS = st.sampled_from(["", "*", "+", "?", "{2}", "{1,3}", "{2,}", "+?"])


def _joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("".join, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda parts, more: f"({'|'.join(parts)}){more}", st.lists(inner, min_size=1, max_size=3), REPEATS),
        st.builds(lambda part, more: f"(?:{part}){more}", inner, REPEATS),
    )


PATTERNS = st.recursive(st.builds(lambda one, more: f"{one}{more}", LITERALS, REPEATS), _joined, max_leaves=6)


@given(PATTERNS, st.integers(0, 100))
def test_a_text_matches_its_expression_as_a_whole(pattern: str, seed: int) -> None:
    text = matching_text(f"^{pattern}$" if "|" not in pattern else pattern, random.Random(seed))

    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)b", "(?<!a)b", "a\\1", "\\bword", "a^b", "a$b", "(a", "a)", "[a", "*a", "a{2", "a{x}", "a{65}", "[z-a]",
     "\\", "[^\\D]", "(" * 30 + "a" + ")" * 30, "((((a{60}){60}){60}){60}){60}", "((((a{0}){60}){60}){60}){60}"],
)  # fmt: skip
def test_what_the_simulator_cannot_do_is_refused(pattern: str) -> None:
    with pytest.raises(BadPattern):
        matching_text(pattern, random.Random(1))
