"""The commands of `make up` and `make down` about the fleet: record it, stop its machines, boot them again."""

from datetime import timedelta
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from fleet.capacity.planning.rates import RateKind
from fleet.capacity.services import rate_set
from fleet.clouds.base import provider_named
from fleet.clouds.local import LocalProvider
from fleet.deployments.models import Deployment
from fleet.regions.models import Rate, Region
from kernel import clock
from lab.checkpoints import CONFIGS, write_checkpoint
from models_registry.instance_types.selectors import instance_shapes
from models_registry.versions.models import CheckpointRecord
from models_registry.versions.selectors import version_memory
from tests.models_registry.rows import DIGEST, artifact
from traffic.routing.models import Ingress

pytestmark = pytest.mark.django_db


def run(command: str, *arguments: str) -> str:
    out = StringIO()
    call_command(command, *arguments, stdout=out)
    return out.getvalue().strip()


@pytest.fixture
def home(tmp_path: Path, settings: Any) -> Path:
    settings.SWITCHYARD_HOME = tmp_path / "home"
    return tmp_path / "home"


def test_the_demo_is_recorded_with_an_ingress_for_each_region_from_one_port_upwards(settings: Any) -> None:
    settings.SWITCHYARD_INGRESS_PORT = 26080
    assert run("seed_demo", "--engine", "sim") == "demo fleet recorded"
    assert set(Ingress.objects.values_list("id", "port")) == {("i-us-east-1", 26080), ("i-us-west-2", 26081)}
    assert set(Deployment.objects.values_list("name", flat=True)) == {"smollm2", "sim-70b"}
    assert [(row.subject, row.value) for row in Rate.objects.all()] == [("local.cpu", Decimal("0.045"))]


def test_a_second_ingress_of_each_region_has_the_ports_above(settings: Any) -> None:
    settings.SWITCHYARD_INGRESS_PORT, settings.SWITCHYARD_INGRESSES = 26080, 2
    run("seed_demo", "--engine", "sim")
    first = {("i-us-east-1", 26080), ("i-us-west-2", 26081)}
    ports = set(Ingress.objects.values_list("id", "port"))
    assert ports == first | {("i-us-east-1-2", 26082), ("i-us-west-2-2", 26083)}


def test_a_price_that_an_operator_set_stays() -> None:
    run("seed_demo", "--engine", "sim")
    now = clock.now() + timedelta(days=1)
    rate_set(kind=RateKind.MACHINE_PRICE, subject="local.cpu", value=Decimal(1), actor="ann", now=now)
    run("seed_demo", "--engine", "sim")
    assert Rate.objects.count() == 2


def test_a_region_of_another_provider_gets_no_ingress_on_this_machine() -> None:
    Region.objects.create(name="eu-central-1", provider="aws", position=2)
    run("seed_demo", "--engine", "sim")
    assert not Ingress.objects.filter(region="eu-central-1").exists()


def test_real_weights_must_be_named() -> None:
    with pytest.raises(CommandError, match="--engine vllm needs --artifact-uri and --artifact-digest"):
        run("seed_demo", "--artifact-uri", "file:///weights")
    assert not Deployment.objects.exists()


def test_the_dimensions_of_real_weights_are_read_for_the_arithmetic_of_their_memory(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", CONFIGS["gqa"], weights=False)
    manifest = artifact(tmp_path / "model", {})
    named = ("--artifact-uri", (tmp_path / "model").as_uri(), "--artifact-digest", manifest.digest)
    for _ in range(2):
        assert run("seed_demo", *named) == "demo fleet recorded"
    assert CheckpointRecord.objects.get().facts["shape"]["layers"] == 12
    version = Deployment.objects.get(name="smollm2").model_version
    assert version_memory(version, instance_shapes()).problem == ""


def test_weights_that_cannot_be_read_have_no_arithmetic() -> None:
    run("seed_demo", "--artifact-uri", "file:///weights", "--artifact-digest", DIGEST)
    assert Deployment.objects.filter(name="smollm2").exists()
    assert not CheckpointRecord.objects.exists()


def test_with_a_password_the_operator_can_get_in(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_OPERATOR_PASSWORD", "a long password")
    run("seed_demo", "--engine", "sim")
    assert (home / "operator-token").read_text().startswith("sw_")


def test_stopping_and_booting_an_empty_fleet_says_that_there_was_nothing_to_do(home: Path) -> None:
    assert run("fleet_stop") == f"stopped 0 processes of {home}"
    assert run("fleet_resume") == "no stopped machine to boot"


def test_the_local_provider_is_made_for_this_home(home: Path) -> None:
    provider = provider_named("local")
    assert isinstance(provider, LocalProvider)
    assert provider.home == home
