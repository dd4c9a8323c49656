"""Patterns whose time grows faster than the text are found, and the product has none."""

import pytest

from tests.checks.linear_patterns import uses, why_not_linear


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"(a*)*b",
        r"a*a*b",
        r"(x+x+)+y",
        r"(?:a|b|ab)*c",
        r"(?i)[a-z]*A*!",
        r"\w+://",
        r"\s+$",
        r"(\w+://)[^/:@]+:[^/@]+@",
    ],
)
def test_a_pattern_that_may_match_a_text_in_many_ways_is_found(pattern: str) -> None:
    assert why_not_linear(pattern)


@pytest.mark.parametrize("pattern", [r"[a-z]+", r"^(\S+) (\S+)$", r"\b\w{1,20}://[^/]{1,256}@", r"https://x/\S+"])
def test_a_pattern_that_matches_in_one_way_is_not(pattern: str) -> None:
    assert why_not_linear(pattern) is None


@pytest.mark.parametrize("pattern", [r"(?:[^\"\\]++|\\.)*+", r"(?:[^\"{]++|\"(?:[^\"\\]++|\\.)*+\")*+"])
def test_what_takes_all_that_there_is_leaves_a_loop_around_it_nothing(pattern: str) -> None:
    assert why_not_linear(pattern, searched=False) is None
    assert why_not_linear(pattern.replace("++", "+"), searched=False)


@pytest.mark.parametrize("pattern", [r"\d+\.\d*", r"(?:[^\"\\]|\\.)*\"?", r"(?:ab|cd)*e", r"\w+://"])
def test_what_begins_where_the_text_does_may_run_to_its_end(pattern: str) -> None:
    assert why_not_linear(pattern) is not None
    assert why_not_linear(pattern, searched=False) is None


@pytest.mark.slow
def test_every_pattern_of_the_product_is_linear() -> None:
    checked = list(uses())
    assert len(checked) > 50
    assert [(use.place, why) for use in checked if (why := why_not_linear(use.pattern, searched=use.searched))] == []
