"""Times and shares as people write them."""

import pytest

from lab.hosts.console import seconds, share, skew_text
from lab.hosts.topology import NoLaboratory


@pytest.mark.parametrize(
    ("text", "value"),
    [("200ms", 0.2), ("1.5s", 1.5), ("+1h", 3600), ("-10m", -600), ("2d", 172800), ("0", 0), ("-0", 0)],
)
def test_a_time(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "5", "ms", "1 s", "1h30m", "--1s", "1e3s", "٣s", "1" * 10 + "s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(NoLaboratory, match="is no time"):
        seconds(text)


def test_a_share() -> None:
    assert (share("2%"), share("0"), share("100%"), share("0.5%")) == (0.02, 0, 1, 0.005)


@pytest.mark.parametrize("text", ["", "%", "101%", "-1%", "2 %"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(NoLaboratory, match="is no share"):
        share(text)


@pytest.mark.parametrize(
    ("ahead_s", "text"), [(0, "right"), (3600, "1 h ahead"), (-600, "10 m behind"), (0.2, "200 ms ahead")]
)
def test_a_clock(ahead_s: float, text: str) -> None:
    assert skew_text(ahead_s) == text
