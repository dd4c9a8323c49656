"""Nodes of a future cell connect, measure every link and compute the same sum; other connections take no part."""

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from engine_agent.node.checks import links
from engine_agent.node.checks.links import LinkMember, LinkPlan, check_links, plan_from
from engine_agent.node.checks.result import Result

HOST = "127.0.0.1"


@pytest.fixture
def ports() -> Iterator[list[int]]:
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        held = []
        for each in (one, two, three):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind((HOST, 0))
            held.append(each.getsockname()[1])
        yield held


def plans(ports: list[int], *, within_s: float = 30.0) -> list[LinkPlan]:
    members = tuple(LinkMember(rank, HOST, port) for rank, port in enumerate(ports))
    return [LinkPlan(member.rank, members, "a secret", mib=1, within_s=within_s) for member in members]


def run(all_plans: list[LinkPlan]) -> list[tuple[Result, Result]]:
    found: dict[int, tuple[Result, Result]] = {}

    def one(plan: LinkPlan) -> None:
        found[plan.rank] = check_links(plan)

    threads = [threading.Thread(target=one, args=(plan,)) for plan in all_plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[plan.rank] for plan in all_plans]


def test_every_pair_is_measured_and_all_get_one_sum(ports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SLOW_SHARE", 0.0)  # what speed a busy machine gives its threads says nothing here
    monkeypatch.setattr(links, "LEAST_MIB_S", 0.0)
    for link, total in run(plans(ports)):
        assert (link.ok, total.ok) == (True, True), (link, total)
        assert link.numbers["links"] == 2
        assert total.found == "3 members added up 4096 numbers to the same sum"


def test_a_member_that_does_not_come_is_named(ports: list[int]) -> None:
    here = plans(ports, within_s=0.5)[0]
    link, total = check_links(here)
    assert link.ok is False
    assert f"rank 1 ({HOST}:{ports[1]}), rank 2 ({HOST}:{ports[2]}) did not connect within 0.5 s" in link.found
    assert total.ok is None


def test_who_does_not_know_the_secret_takes_no_part(ports: list[int]) -> None:
    first, second = plans(ports[:2], within_s=1.0)
    stranger = LinkPlan(1, second.members, "another secret", mib=1, within_s=1.0)
    (link, _), (theirs, _) = run([first, stranger])
    assert link.ok is False
    assert theirs.ok is False
    assert "did not connect" in link.found


def test_a_link_that_is_much_slower_than_the_others_fails() -> None:
    members = tuple(LinkMember(rank, HOST, 1) for rank in range(3))
    judged = links._speed_result(LinkPlan(0, members, "s"), {1: (400.0, 400.0), 2: (90.0, 400.0)})
    assert judged.ok is False
    assert judged.found == "2 links of 90 to 400 MiB/s, the slowest with rank 2"
    assert judged.wanted == "at least 100 MiB/s, a quarter of this node's fastest link"


def test_a_plan_is_read_and_checked() -> None:
    text = json.dumps({"rank": 0, "secret": "s", "members": [{"rank": 0, "address": HOST, "port": 1}]})
    with pytest.raises(ValueError, match="1 members; links are checked between 2 and 32"):
        _ = plan_from(text).own
    for bad in ("[]", "{", '{"rank": 0}', '{"members": [{"rank": 0}]}'):
        with pytest.raises(ValueError, match="invalid plan of links"):
            plan_from(bad)
