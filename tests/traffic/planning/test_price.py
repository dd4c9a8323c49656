"""What tokens cost: exact, by the price in force, cached tokens apart."""

from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.rate import Rate, RateKind, Rates
from tests.fleet.rows import NOW
from traffic.planning.price import TokenPrice, charge, token_price

PRICE = TokenPrice(prompt=Decimal("0.6"), cached=Decimal("0.06"), completion=Decimal("1.8"))
AMOUNT = st.decimals(min_value=0, max_value=1000, places=6)
COUNT = st.integers(0, 2**50)


def test_cached_tokens_are_a_part_of_the_prompt() -> None:
    tokens = {"prompt_tokens": 1_000_000, "cached_tokens": 400_000, "completion_tokens": 10}
    assert charge(tokens, PRICE) == Decimal("0.384018")
    assert charge({**tokens, "cached_tokens": 2_000_000}, PRICE) == Decimal("0.060018")
    assert charge(tokens, None) == charge({}, PRICE) == 0


PROMPT, CACHED, COMPLETION = RateKind.PROMPT_PRICE, RateKind.CACHED_PRICE, RateKind.COMPLETION_PRICE


def rates(*stated: tuple[RateKind, str], ahead: timedelta = timedelta()) -> list[Rate]:
    return [Rate(kind, "sim", "", Decimal(value), NOW + ahead) for kind, value in stated]


@pytest.mark.parametrize(
    ("stated", "price"),
    [
        ([(PROMPT, "0.6"), (CACHED, "0.06"), (COMPLETION, "1.8")], PRICE),
        ([(PROMPT, "2"), (COMPLETION, "3")], TokenPrice(Decimal(2), Decimal(2), Decimal(3))),
        ([(PROMPT, "2"), (CACHED, "0")], TokenPrice(Decimal(2), Decimal(0), Decimal(0))),
        ([(COMPLETION, "3")], TokenPrice(Decimal(0), Decimal(0), Decimal(3))),
        ([(CACHED, "1"), (RateKind.MACHINE_PRICE, "9")], None),
    ],
)
def test_the_price_of_tokens_is_made_of_the_rates_of_their_deployment(
    stated: list[tuple[RateKind, str]], price: TokenPrice | None
) -> None:
    assert token_price(Rates(rates(*stated), NOW), "sim") == price
    assert token_price(Rates(rates(*stated), NOW), "other") is None


def test_the_price_in_force_is_the_last_that_has_begun() -> None:
    stated = [*rates((PROMPT, "1")), *rates((PROMPT, "9"), ahead=timedelta(seconds=1))]
    found = [token_price(Rates(stated, NOW + timedelta(seconds=second)), "sim") for second in (-1, 0, 1)]
    assert [price and price.prompt for price in found] == [None, 1, 9]


@given(st.lists(st.tuples(COUNT, COUNT, COUNT), max_size=20), AMOUNT, AMOUNT, AMOUNT)
def test_what_is_charged_in_parts_is_what_is_charged_at_once(
    parts: list[tuple[int, int, int]], prompt: Decimal, cached: Decimal, completion: Decimal
) -> None:
    price = TokenPrice(prompt, cached, completion)
    told = [{"prompt_tokens": p, "cached_tokens": min(p, c), "completion_tokens": o} for p, c, o in parts]
    whole = {name: sum(each[name] for each in told) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
    assert sum((charge(each, price) for each in told), Decimal(0)) == charge(whole, price)
