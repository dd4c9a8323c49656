"""What tokens cost: exact, by the price in force, cached tokens apart."""

from datetime import timedelta
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from tests.fleet.rows import NOW
from traffic.planning.price import TokenPrice, charge, prices_at

PRICE = TokenPrice("sim", NOW, prompt=Decimal("0.6"), cached=Decimal("0.06"), completion=Decimal("1.8"))
AMOUNT = st.decimals(min_value=0, max_value=1000, places=6)
COUNT = st.integers(0, 2**50)


def test_cached_tokens_are_a_part_of_the_prompt() -> None:
    tokens = {"prompt_tokens": 1_000_000, "cached_tokens": 400_000, "completion_tokens": 10}
    assert charge(tokens, PRICE) == Decimal("0.384018")
    assert charge({**tokens, "cached_tokens": 2_000_000}, PRICE) == Decimal("0.060018")
    assert charge(tokens, None) == charge({}, PRICE) == 0


def test_the_price_in_force_is_the_last_that_has_begun() -> None:
    later = TokenPrice("sim", NOW + timedelta(seconds=1), Decimal(9), Decimal(9), Decimal(9))
    other = TokenPrice("other", NOW + timedelta(days=1), Decimal(9), Decimal(9), Decimal(9))
    assert prices_at([later, PRICE, other], NOW) == {"sim": PRICE}
    assert prices_at([later, PRICE, other], later.valid_from) == {"sim": later}
    assert prices_at([PRICE], NOW - timedelta(seconds=1)) == {}


@given(st.lists(st.tuples(COUNT, COUNT, COUNT), max_size=20), AMOUNT, AMOUNT, AMOUNT)
def test_what_is_charged_in_parts_is_what_is_charged_at_once(
    parts: list[tuple[int, int, int]], prompt: Decimal, cached: Decimal, completion: Decimal
) -> None:
    price = TokenPrice("sim", NOW, prompt, cached, completion)
    told = [{"prompt_tokens": p, "cached_tokens": min(p, c), "completion_tokens": o} for p, c, o in parts]
    whole = {name: sum(each[name] for each in told) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
    assert sum((charge(each, price) for each in told), Decimal(0)) == charge(whole, price)
