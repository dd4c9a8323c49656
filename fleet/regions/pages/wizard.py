"""The wizard of regions: on this computer, on joined machines, or in AWS. It decides nothing: services check and apply
its document."""

from django.db.models import Max
from django.urls import reverse

from controlplane.api.apply.planning import Kind
from controlplane.dashboard.fragments import PageRequest
from controlplane.dashboard.wizards import (
    Documents,
    Input,
    InputKind,
    Option,
    Step,
    Typed,
    Values,
    Wizard,
    document,
    nested,
)
from fleet.clouds.services.regions import AWS, ECS
from fleet.machines.planner import LOCAL, POOLED
from fleet.regions.models import Region
from models_registry.instance_types.selectors import instance_type_names

PROVIDERS = (
    Option(LOCAL, "local", "processes on this computer"),
    Option(POOLED, "machines", "hosts that join it"),
    Option(AWS, "AWS", "instances in an account"),
    Option(ECS, "ECS", "tasks on the container instances of a cluster"),
)
COLUMNS = ("provider", "stack", "aws_region", "position", "ingress_url", "plain_http", "cheapest_first", "grpc")
ALARMS_ABOUT = (
    "An alarm about one machine opens an incident about its node; any other, one about its cell, its group of machines "
    "or the region. {node} or {cell} in the text stands for an ID."
)


def _providers(typed: Typed) -> tuple[Option, ...]:
    return PROVIDERS


def _types(typed: Typed) -> list[Option]:
    return [Option(name) for name in instance_type_names()]


def _documents(values: Values) -> Documents:
    spec = nested(values, COLUMNS)
    if rows := values.get("spares"):
        spec["spares"] = {
            row["type"]: {"warm": row["warm"], "repair_only": row["repair_only"]}
            if "repair_only" in row
            else row["warm"]
            for row in rows
        }
    if alarms := values.get("alarms"):
        spec["alarms"] = alarms
    return [document(Kind.REGION, values["name"], spec)]


def _start(request: PageRequest) -> dict[str, str]:
    last = Region.objects.aggregate(last=Max("position"))["last"]
    return {"position": str(0 if last is None else last + 1)}


REGION_WIZARD = Wizard(
    title="New region",
    section="regions",
    about="A region is a failure domain with its own nodes and ingresses. It starts empty: deployments get cells in it "
    "after this.",
    steps=(
        Step(
            "Place",
            (
                Input(
                    name="name",
                    at="Region.metadata.name",
                    required=True,
                    placeholder="eu-west-1",
                    help="1 to 40 lower-case letters, digits, - and _. It never changes.",
                ),
                Input(
                    name="provider",
                    at="Region.provider",
                    kind=InputKind.CHOICE,
                    value=LOCAL,
                    required=True,
                    options=_providers,
                    help="Where its machines come from. It never changes.",
                ),
            ),
        ),
        Step(
            "AWS",
            (
                Input(name="stack", at="Region.stack", placeholder="switchyard-eu-west-1"),
                Input(name="aws_region", at="Region.aws_region", label="AWS region", placeholder="eu-west-1"),
                Input(name="cheapest_first", at="Region.cheapest_first", label="Cheapest pools first"),
            ),
            about="Only for a region in AWS. Its stack is created from deploy/aws/region.yaml, or from "
            "deploy/aws/ecs.yaml for an ECS cluster, and read after this.",
            folded=True,
        ),
        Step(
            "Ingresses",
            (
                Input(name="ingress_url", at="Region.ingress_url", label="URL", placeholder="https://eu.example.com"),
                Input(name="position", at="Region.position"),
                Input(name="plain_http", at="Region.plain_http", label="Plain HTTP"),
                Input(name="grpc", at="Region.grpc", label="gRPC"),
            ),
        ),
        Step(
            "Spare nodes",
            (
                Input(
                    name="spares",
                    at="Region.spares",
                    label="Idle nodes to keep",
                    options=_types,
                    suggests=True,
                    help="New cells and repairs start on them without a wait for a machine.",
                    columns=(
                        Input(name="type", label="Instance type", required=True, suggests=True),
                        Input(name="warm", label="Nodes", kind=InputKind.NUMBER, required=True),
                        Input(name="repair_only", label="Of these only for repairs", kind=InputKind.NUMBER),
                    ),
                ),
            ),
            folded=True,
        ),
        Step(
            "Alarms",
            (
                Input(
                    name="alarms",
                    at="Region.alarms",
                    label="Alarms of CloudWatch",
                    columns=(
                        Input(name="prefix", label="Names begin with", required=True, placeholder="switchyard-node-"),
                        Input(name="replaces", label="Replaces machines", kind=InputKind.CHECK),
                    ),
                ),
            ),
            about=ALARMS_ABOUT,
            folded=True,
        ),
    ),
    documents=_documents,
    kinds=frozenset({Kind.REGION}),
    creates=frozenset({Kind.REGION}),
    url=lambda documents: reverse("region", args=(documents[0]["metadata"]["name"],)),
    start=_start,
)
