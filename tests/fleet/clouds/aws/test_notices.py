"""Every documented form of announcement, and malformed ones."""

import contextlib
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.clouds.aws.notices import (
    BLOCK_ENDS,
    INTERRUPTIONS,
    REBALANCE,
    Announcement,
    CalledOff,
    Nothing,
    StateSeen,
    UnreadableNotice,
    parse,
)
from fleet.reconcile.planning.states import NoticeKind

AT = datetime(2026, 11, 23, 12, tzinfo=UTC)
MACHINE = "i-0123456789abcdef0"


def event(kind: str, detail: dict[str, Any], **changes: Any) -> str:
    whole = {
        "version": "0", "id": "e-1", "detail-type": kind, "source": "aws.ec2", "account": "1", "region": "us-east-1",
        "time": "2026-11-23T12:00:00Z", "resources": [f"arn:aws:ec2:us-east-1:1:instance/{MACHINE}"], "detail": detail,
    }  # fmt: skip
    return json.dumps(whole | changes)


def said(kind: NoticeKind, lead_s: float | None, text: str, **changes: Any) -> Announcement:
    ends_at = None if lead_s is None else AT + timedelta(seconds=lead_s)
    return Announcement("e-1", kind, AT, ends_at, text, **{"machines": (MACHINE,)} | changes)


@pytest.mark.parametrize("kind", sorted(INTERRUPTIONS))
@pytest.mark.parametrize("detail", [{"instance-id": MACHINE, "instance-action": "terminate"}, {}])
def test_what_is_taken_back_ends_two_minutes_later(kind: str, detail: dict[str, str]) -> None:
    assert parse(event(kind, detail)) == said(NoticeKind.INTERRUPTION, 120, kind)


def test_a_recommendation_says_no_end() -> None:
    assert parse(event(REBALANCE, {"instance-id": MACHINE})) == said(NoticeKind.REBALANCE, None, REBALANCE)


@pytest.mark.parametrize("kind", sorted(BLOCK_ENDS))
def test_machines_of_a_capacity_block_end_half_an_hour_before_it_in_both_spellings(kind: str) -> None:
    assert len(BLOCK_ENDS) == 2
    detail = {"capacity-reservation-id": "cr-1", "end-date": "2026-11-23T12:40:00Z"}
    expected = said(NoticeKind.BLOCK_END, 600, kind, machines=(), reservation="cr-1")
    assert parse(event(kind, detail, resources=[])) == expected


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("AWS_EC2_PERSISTENT_INSTANCE_RETIREMENT_SCHEDULED", NoticeKind.RETIREMENT),
        ("AWS_EC2_INSTANCE_STOP_SCHEDULED", NoticeKind.RETIREMENT),
        ("AWS_EC2_SYSTEM_MAINTENANCE_EVENT", NoticeKind.MAINTENANCE),
        ("AWS_EC2_INSTANCE_REBOOT_MAINTENANCE_SCHEDULED", NoticeKind.MAINTENANCE),
    ],
)
def test_health_says_when_a_machine_is_retired_or_maintained(code: str, kind: NoticeKind) -> None:
    detail = {
        "eventTypeCode": code, "statusCode": "upcoming", "startTime": "Wed, 25 Nov 2026 12:00:00 GMT",
        "affectedEntities": [{"entityValue": MACHINE}],
    }  # fmt: skip
    assert parse(event("AWS Health Event", detail, resources=[])) == said(kind, 2 * 86400, code)
    closed = parse(event("AWS Health Event", detail | {"statusCode": "closed"}))
    assert isinstance(closed, CalledOff)
    assert (closed.kind, closed.machines) == (kind, (MACHINE,))
    assert parse(event("AWS Health Event", detail | {"eventTypeCode": "AWS_S3_OPERATIONAL_ISSUE"})) == Nothing()


def test_a_change_of_state_is_seen() -> None:
    body = event("EC2 Instance State-change Notification", {"instance-id": MACHINE, "state": "shutting-down"})
    assert parse(body) == StateSeen(MACHINE, "shutting-down")


@pytest.mark.parametrize(
    "body",
    [
        "", "{}", "[1]", "null", '{"id": 5}', "NaN", "[" * 100_000,
        event("Something Else", {"instance-id": MACHINE}),
        event(REBALANCE, {"instance-id": 5}),
        event(REBALANCE, {}, resources=[]),
        event(REBALANCE, {"instance-id": MACHINE}, time="2026-11-23T12:00:00"),
        event("Capacity Block Expiration Warning", {"capacity-reservation-id": "cr-1"}),
        event("Capacity Block Expiration Warning", {"capacity-reservation-id": "cr-1", "end-date": "soon"}),
        event("AWS Health Event", {}),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_a_reason(body: str) -> None:
    with pytest.raises(UnreadableNotice, match=r"\w"):
        parse(body)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "instance-id",
                        "state",
                        "eventTypeCode",
                        "startTime",
                        "affectedEntities",
                        "end-date",
                        "capacity-reservation-id",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    ),
    st.sampled_from([*sorted(INTERRUPTIONS | BLOCK_ENDS), "AWS Health Event", REBALANCE]),
)
def test_whatever_a_detail_holds_nothing_else_is_raised(detail: Any, kind: str) -> None:
    with contextlib.suppress(UnreadableNotice):
        parse(event(kind, detail))
