"""Workloads and objectives: text to value and back, and errors that name the wrong part."""

import pytest

from models_registry.benchmarks.planning.workload import (
    Arrival,
    InvalidWorkload,
    Prompts,
    Slo,
    Workload,
    parse_slo,
    parse_workload,
)

SENTENCES = {
    "1000+150": Workload("synthetic", 1000, 150),
    "3000+200,prefix=512,groups=8,arrival=uniform": Workload(
        "synthetic", 3000, 200, prefix=512, groups=8, arrival=Arrival.UNIFORM
    ),
    "10+10,sigma=0.5,prompts=words": Workload("synthetic", 10, 10, sigma=0.5, prompts=Prompts.WORDS),
    "mooncake,longest=2048": Workload("mooncake", arrival=Arrival.TRACE, longest=2048),
    "azure,arrival=poisson": Workload("azure", arrival=Arrival.POISSON),
}


@pytest.mark.parametrize(("text", "meant"), SENTENCES.items())
def test_a_sentence_is_read_and_written_back(text: str, meant: Workload) -> None:
    assert parse_workload(text) == meant
    assert parse_workload(meant.text) == meant


def test_equal_workloads_have_one_digest_however_they_are_written() -> None:
    assert parse_workload("8+8, groups=2,prefix=4").digest == parse_workload("8+8,prefix=4,groups=2").digest
    assert parse_workload("8+8").digest != parse_workload("8+9").digest


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "PROMPT+OUTPUT"),
        ("many", "PROMPT+OUTPUT (1000+150) or azure or mooncake"),
        ("10", "PROMPT+OUTPUT"),
        ("٣+٣", "PROMPT+OUTPUT"),
        ("0+5", "from 1 to 131072"),
        ("131072+1", "in total"),
        ("10+5,sigma", "each of these once"),
        ("10+5,size=3", "each of these once"),
        ("10+5,sigma=1,sigma=2", "each of these once"),
        ("10+5,sigma=nan", "a number from 0 to 3"),
        ("10+5,prefix=10", "from 0 to 9"),
        ("10+5,arrival=often", "poisson or uniform"),
        ("10+5,arrival=trace", "poisson or uniform"),
        ("mooncake,prefix=5", "has its own"),
    ],
)
def test_what_is_wrong_is_named(text: str, why: str) -> None:
    with pytest.raises(InvalidWorkload) as refused:
        parse_workload(text)
    assert why in str(refused.value)


def test_an_objective_is_in_milliseconds() -> None:
    assert parse_slo("ttft=500, itl=50") == parse_slo("itl=50,ttft=500") == Slo(0.5, 0.05)
    assert parse_slo(Slo(0.5, 0.05).text) == Slo(0.5, 0.05)


@pytest.mark.parametrize("text", ["", "ttft=1", "ttft=1,itl=x", "ttft=0,itl=5", "ttft=1,itl=2,e2e=3", "ttft=inf,itl=1"])
def test_an_objective_needs_both(text: str) -> None:
    with pytest.raises(InvalidWorkload, match="slo"):
        parse_slo(text)


@pytest.mark.parametrize(
    ("ttft_s", "end_s", "tokens", "inside"),
    [(0.5, 0.5, 1, True), (0.51, 0.51, 1, False), (0.1, 0.6, 11, True), (0.1, 0.61, 11, False), (0.1, 9.0, 0, True)],
)
def test_inside_is_both_in_time(ttft_s: float, end_s: float, tokens: int, inside: bool) -> None:
    assert Slo(0.5, 0.05).is_inside(ttft_s, end_s, tokens) is inside
