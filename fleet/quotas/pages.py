"""The wizard that sets a team's quota. It decides nothing: a service checks and applies its document."""

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
from fleet.deployments.models import Deployment
from fleet.quotas.models import Quota, quota_name
from fleet.regions.models import Region
from models_registry.instance_types.selectors import instance_type_names

NAMES = ("team", "instance_type", "region")


def _teams(typed: Typed) -> list[Option]:
    teams = Deployment.objects.exclude(team="").order_by("team").values_list("team", flat=True).distinct()
    return [Option(team) for team in teams]


def _types(typed: Typed) -> list[Option]:
    return [Option(name) for name in instance_type_names()]


def _regions(typed: Typed) -> list[Option]:
    return [Option("", "all regions"), *(Option(name) for name in Region.objects.values_list("name", flat=True))]


def _start(request: PageRequest) -> dict[str, str]:
    """The quota that the URL names."""
    return _stored_quota(*(request.text(name) for name in NAMES))


def _stored(typed: Typed) -> dict[str, str]:
    return _stored_quota(*map(typed.text, NAMES))


def _stored_quota(team: str, instance_type: str, region: str) -> dict[str, str]:
    texts = dict(zip(NAMES, (team, instance_type, region), strict=True))
    row = Quota.objects.filter(name=quota_name(team, instance_type, region)).first()
    if row is None:
        return texts
    return texts | {
        "machines": str(row.machines),
        "borrow_most": "" if row.borrow_most is None else str(row.borrow_most),
    }


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
    start=_start,
    stored=_stored,
    url=lambda documents: f"{reverse('deployments')}#quotas",
)
