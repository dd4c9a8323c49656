"""The wizard that sets a team's quota. It decides nothing: a service checks and applies its document."""

from django.urls import reverse

from controlplane.api.apply.planning import Kind
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
from fleet.deployments.models import Deployment
from fleet.quotas.models import quota_name
from fleet.regions.models import Region
from models_registry.instance_types.selectors import instance_type_names


def _teams(typed: Typed) -> list[Option]:
    teams = Deployment.objects.exclude(team="").order_by("team").values_list("team", flat=True).distinct()
    return [Option(team) for team in teams]


def _types(typed: Typed) -> list[Option]:
    return [Option(name) for name in instance_type_names()]


def _regions(typed: Typed) -> list[Option]:
    return [Option("", "all regions"), *(Option(name) for name in Region.objects.values_list("name", flat=True))]


def _documents(values: Values) -> Documents:
    name = quota_name(values["team"], values["instance_type"], values.get("region", ""))
    spec = {"borrow_most": None, **nested(values, ("machines", "borrow_most"))}
    return [document(Kind.QUOTA, name, spec)]


QUOTA_WIZARD = Wizard(
    title="Quota of a team",
    section="deployments",
    about="Machines of an instance type that a team is entitled to. A quota that exists is changed.",
    steps=(
        Step(
            "Team and type",
            (
                Input(
                    name="team",
                    at="Quota.metadata.name",
                    required=True,
                    options=_teams,
                    help="As its deployments name it.",
                ),
                Input(
                    name="instance_type",
                    at="Quota.instance_type",
                    kind=InputKind.CHOICE,
                    required=True,
                    options=_types,
                ),
                Input(
                    name="region",
                    at="Quota.region",
                    kind=InputKind.CHOICE,
                    options=_regions,
                    help="All regions: in addition to the quotas of each.",
                ),
            ),
        ),
        Step(
            "Machines",
            (
                Input(name="machines", at="Quota.machines", required=True),
                Input(name="borrow_most", at="Quota.borrow_most", label="May borrow at most", placeholder="any number"),
            ),
        ),
    ),
    documents=_documents,
    kinds=frozenset({Kind.QUOTA}),
    url=lambda documents: f"{reverse('deployments')}#quotas",
)
