"""A leader of followers gets a certificate at every start, and nobody else does."""

import pytest

from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE, Launch
from engine_agent.engines.cell.tls import leader_certificate
from engine_agent.node.cell_certificate import with_certificate
from tests.engine_agent.engines.contexts import peer
from tests.engine_agent.orders import assignment

PAIR = (peer(0), peer(1))
LAUNCH = Launch(("python",), {"A": "1"})


def test_a_leader_of_followers_has_another_certificate_at_every_start() -> None:
    starts = [with_certificate(LAUNCH, assignment(peers=PAIR)) for _ in range(2)]
    bindings = {leader_certificate(start.env[CELL_CERTIFICATE_VARIABLE]).binding for start in starts}
    assert len(bindings) == 2
    assert all((start.argv, start.env["A"]) == (("python",), "1") for start in starts)


@pytest.mark.parametrize(("rank", "peers"), [(1, PAIR), (0, (peer(0),))], ids=["a follower", "a cell of one node"])
def test_who_meets_no_followers_has_none(rank: int, peers: tuple[object, ...]) -> None:
    assert with_certificate(LAUNCH, assignment(rank=rank, peers=peers)) == LAUNCH  # type: ignore[arg-type]
