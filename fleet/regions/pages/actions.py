"""Actions of a region's page: its gateway for gRPC, and the alarms of CloudWatch that are evidence of faults."""

from django.urls import reverse

from controlplane.dashboard.actions import Action, Field, Run, Submission, Target, action_view
from fleet.clouds.planning.alarms import parse_alarms
from fleet.machines.planner import CLOUDS
from fleet.regions.models import Region
from fleet.regions.pages.pools import region_or_404
from fleet.regions.services import region_change


def _setting_grpc(*, on: bool) -> Run[Region]:
    def run(form: Submission, region: Region) -> None:
        region_change(name=region.pk, columns={"grpc": on}, actor=form.actor, now=form.now)

    return run


REGION_TARGET = Target(
    noun="region",
    find=region_or_404,
    name=lambda region: region.pk,
    url=lambda region: reverse("region", args=(region.pk,)),
    action_url=lambda region, name: reverse("region-action", args=(region.pk, name)),
)
GRPC_ON = Action(
    target=REGION_TARGET,
    name="serve-grpc",
    label="Serve gRPC",
    run=_setting_grpc(on=True),
    effect=lambda region, now: (
        "Its ingresses start a gateway of 42 MiB each and listen on two further ports, "
        "4000 and 5000 above their port for HTTP. HTTP requests continue."
    ),
    words=("triton", "kserve", "open inference protocol"),
)
GRPC_OFF = Action(
    target=REGION_TARGET,
    name="stop-grpc",
    label="Stop gRPC",
    run=_setting_grpc(on=False),
    effect=lambda region, now: "Its ingresses close their ports for gRPC. Calls in progress have 20 s to finish.",
)
ALARM_TEXT_MOST = 3000
ALARM_FIELDS = (("warn", False), ("replace", True))
"""Fields of the form, and whether their alarms replace machines."""


def _alarms_set(form: Submission, region: Region) -> None:
    alarms = [
        {"prefix": line.strip(), "replaces": replaces}
        for name, replaces in ALARM_FIELDS
        for line in form.text(name, longest=ALARM_TEXT_MOST).splitlines()
        if line.strip()
    ]
    region_change(name=region.pk, columns={"alarms": alarms}, actor=form.actor, now=form.now)


def _alarm_fields(region: Region) -> tuple[Field, ...]:
    texts = {name: _prefixes(region, replaces=replaces) for name, replaces in ALARM_FIELDS}
    labels = {"warn": "Evidence only", "replace": "Also replace the machine"}
    return tuple(
        Field(name, f"{labels[name]}: names begin with, one a line", "textarea", value, most=ALARM_TEXT_MOST)
        for name, value in texts.items()
    )


def _prefixes(region: Region, *, replaces: bool) -> str:
    return "\n".join(one.prefix for one in parse_alarms(region.alarms) if one.replaces is replaces)


ALARMS = Action(
    target=REGION_TARGET,
    name="alarms",
    label="Alarms of CloudWatch",
    run=_alarms_set,
    fields=_alarm_fields,
    effect=lambda region, now: (
        "An alarm of one machine (dimension InstanceId, ContainerInstanceId or TaskId, or {node} in its name) opens an "
        "incident about its node while it lasts. Alarms of the second kind also replace the machine, unless more than "
        "a third of similar machines are in alarm. Other alarms open an incident of the cell ({cell} in the name), the "
        "Auto Scaling group, the cluster or the region."
    ),
    why_not=lambda region: "" if region.provider in CLOUDS else "it is in no cloud",
    words=("cloudwatch", "alarm"),
)
region_action = action_view(GRPC_ON, GRPC_OFF, ALARMS)
