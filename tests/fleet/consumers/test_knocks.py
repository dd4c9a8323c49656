"""Who of those that knock at the agents' door costs the database a look-up."""

import pytest

from fleet.consumers.knocks import UNKNOWN_BURST, UNKNOWN_PER_S, Knock, Knocks, credential_of


def credential(prefix: str) -> str:
    return f"sw_{prefix}_{'5e' * 24}"


def knocks(at: list[float]) -> Knocks:
    return Knocks(now=lambda: at[0])


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer nonsense",
        "Basic YTpi",
        "Bearer sw_0000_11",
        f"Bearer {credential('0000000g')}",
        f"Bearer {credential('00000000')}0",
        f"Bearer {credential('00000000')}\n",
        f"Bearer {credential('00000000')} {credential('00000000')}",
        "Bearer sw_" + "0" * 100_000,
    ],
)
def test_what_is_no_credential_of_ours_is_refused(header: str) -> None:
    assert knocks([0.0]).judge(header) is Knock.REFUSED


def test_a_credential_that_exists_is_looked_up_however_many_strangers_knock() -> None:
    known = knocks([0.0])
    known.learn(["0a0b0c0d"])
    strangers = [known.judge(f"Bearer {credential(f'{number:08x}')}") for number in range(2000)]
    assert strangers.count(Knock.LOOKED_UP) == UNKNOWN_BURST
    assert strangers.count(Knock.LATER) == 2000 - UNKNOWN_BURST
    assert known.judge(f"bearer  {credential('0a0b0c0d')} ") is Knock.LOOKED_UP


def test_a_new_credential_is_looked_up_before_it_is_known_of_and_after_a_flood() -> None:
    at = [0.0]
    fresh = knocks(at)
    header = f"Bearer {credential('00000000')}"
    while fresh.judge(header) is Knock.LOOKED_UP:
        pass
    at[0] = 1.0
    assert [fresh.judge(header) for _ in range(int(UNKNOWN_PER_S) + 1)][-2:] == [Knock.LOOKED_UP, Knock.LATER]


def test_what_is_judged_ahead_takes_no_look_up() -> None:
    ahead = knocks([0.0])
    header = f"Bearer {credential('00000000')}"
    assert {ahead.judge(header, counts=False) for _ in range(1000)} == {Knock.LOOKED_UP}
    assert ahead.judge(header) is Knock.LOOKED_UP


def test_the_credential_is_what_stands_behind_the_scheme() -> None:
    assert credential_of(f"BEARER  {credential('00000000')} ") == credential("00000000")
    assert credential_of("Basic YTpi") == ""
