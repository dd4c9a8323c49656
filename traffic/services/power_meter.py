"""Opens an incident about a machine whose power meter lies, and closes it once that is believed again. Within the look
that counts its energy."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime

from fleet.models import Incident, Node
from fleet.planning.states import IncidentState
from fleet.services.incident import incident_open, incidents_close
from traffic.models import UsageMark
from traffic.planning.power_meter import KIND, MeterLook, Suspicion, plan_power_meters

SUSPICIONS = "power-meter"
"""The source of the marks that say how often the meters of a node were refused."""


def power_meters_judge(*, looks: Mapping[str, MeterLook], now: datetime) -> None:
    there = UsageMark.objects.filter(source=SUSPICIONS)
    before = {node: Suspicion(**totals) for node, totals in there.values_list("subject", "totals")}
    open_now = Incident.objects.filter(kind=KIND, state=IncidentState.OPEN.value)
    open_about = frozenset(open_now.values_list("subject", flat=True))
    plan = plan_power_meters(looks, before, open_about, round(now.timestamp() * 1000))
    _remember(plan.suspicions, before, now)
    muted = set(Incident.objects.filter(kind=KIND, muted_until__gt=now).values_list("subject", flat=True))
    for node, summary in plan.opened:
        if node in muted:
            continue
        one = plan.suspicions[node]
        row = Node.objects.select_related("member__cell").get(pk=node)
        cell = row.member.cell if hasattr(row, "member") else None
        incident_open(
            kind=KIND,
            subject=node,
            summary=summary,
            evidence={"refused": one.refused, "since": _moment(one.first_ms), "until": _moment(one.last_ms)},
            now=now,
            region=row.region_id,
            node=node,
            cell=cell.pk if cell else "",
            deployment=cell.deployment_id if cell else "",
        )
    for node, why in plan.closed:
        incidents_close(kind=KIND, subject=node, resolution=why, now=now)


def _remember(kept: Mapping[str, Suspicion], before: Mapping[str, Suspicion], now: datetime) -> None:
    UsageMark.objects.filter(source=SUSPICIONS, subject__in=before.keys() - kept.keys()).delete()
    UsageMark.objects.bulk_create(
        [
            UsageMark(source=SUSPICIONS, subject=node, since="", totals=asdict(one), at=now)
            for node, one in sorted(kept.items())
        ],
        update_conflicts=True,
        unique_fields=["source", "subject", "since"],
        update_fields=["totals", "at"],
    )


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")
