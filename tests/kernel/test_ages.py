"""Durations as people read them."""

import pytest

from kernel.ages import age_text


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [
        (-1, "0 s"), (0.9, "0 s"), (119.9, "119 s"), (120, "2 min"), (7_199, "119 min"), (7_200, "2 h"),
        (172_799, "47 h"), (172_800, "2 d"), (227_888, "2 d"),
    ],
)  # fmt: skip
def test_a_duration_is_in_the_largest_unit_of_which_there_are_two(age_s: float, expected: str) -> None:
    assert age_text(age_s) == expected
    assert age_text(age_s, "\u202f") == expected.replace(" ", "\u202f")
