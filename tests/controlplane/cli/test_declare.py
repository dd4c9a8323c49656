"""Documents on the command line: the plan is shown and applied unchanged; errors name the line of the file."""

import json
from pathlib import Path

import pytest

from fleet.deployments.models import DeploymentRegion
from fleet.deployments.services.demo import demo_seed
from fleet.faults.models import FaultRule
from fleet.regions.models import Region
from fleet.rollouts.models import Rollout
from tests.controlplane.cli.conftest import Switchyard
from tests.fleet import rows

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

TWO_CELLS = """\
apiVersion: switchyard/v1
kind: Deployment
metadata:
  name: sim-70b
spec:
  regions:
    - {region: us-east-1, cells: 2}
---
apiVersion: switchyard/v1
kind: FaultRule
metadata: {name: slow}
spec:
  mode: off
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """A file, and a fleet that differs from it."""
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"), rows.node("n-00000002"))
    path = tmp_path / "fleet.yaml"
    path.write_text(TWO_CELLS)
    return path


def test_a_plan_shows_steps_and_their_effect_and_does_nothing(switchyard: Switchyard, fleet: Path) -> None:
    shown = switchyard("plan", "-f", str(fleet))
    assert shown.code == 0, shown.err
    assert "~ scale Deployment sim-70b: sim-70b should have 2 cells in us-east-1, not 1" in shown.out
    assert "predicted for sim-70b" in shown.out
    assert "mode: on -> off" in shown.out
    assert DeploymentRegion.objects.get().cells == 1


def test_applying_shows_the_plan_and_does_it_once(switchyard: Switchyard, fleet: Path) -> None:
    done = switchyard("apply", "-f", str(fleet), "--yes", "--why", "more room")
    assert done.code == 0, done.err
    assert "2 steps done, 0 unchanged" in done.out
    assert DeploymentRegion.objects.get().cells == 2
    assert FaultRule.objects.get().mode == "off"
    again = switchyard("apply", "-f", str(fleet))
    assert (again.code, again.out.split(" (")[0]) == (0, "0 steps to do, 2 unchanged")


def test_without_a_person_to_ask_it_wants_a_word(switchyard: Switchyard, fleet: Path) -> None:
    refused = switchyard("apply", "-f", str(fleet))
    assert (refused.code, "pass --yes" in refused.err) == (2, True)
    assert DeploymentRegion.objects.get().cells == 1


def test_programs_get_one_document(switchyard: Switchyard, fleet: Path) -> None:
    done = json.loads(switchyard("apply", "-f", str(fleet), "--yes", "-o", "json").out)
    assert done["applied"]
    assert [step["action"] for step in done["steps"]] == ["scale", "change"]


def test_a_difference_is_the_exit_status(switchyard: Switchyard, fleet: Path) -> None:
    found = switchyard("diff", "-f", str(fleet))
    assert found.code == 1
    assert "  - regions.us-east-1.cells: 1\n  + regions.us-east-1.cells: 2" in found.out
    switchyard("apply", "-f", str(fleet), "--yes")
    assert switchyard("diff", "-f", str(fleet)).code == 0


def test_two_versions_are_compared(switchyard: Switchyard) -> None:
    rows.version("1", context_length=2048)
    rows.version("2", context_length=4096)
    found = switchyard("diff", "sim-70b@1", "sim-70b@2")
    assert found.code == 1
    assert "- context_length: 2048\n+ context_length: 4096" in found.out
    assert switchyard("diff", "sim-70b@1", "sim-70b@1").code == 0
    assert switchyard("diff").code == 2


def test_what_is_refused_is_named_by_its_line(switchyard: Switchyard, fleet: Path) -> None:
    fleet.write_text(TWO_CELLS.replace("  regions:", "  regoins:"))
    refused = switchyard("plan", "-f", str(fleet))
    assert refused.code == 3
    assert f"{fleet}:6: documents.0.spec.regoins: unknown field; allowed: " in refused.err


def test_what_is_there_is_exported_as_documents_that_change_nothing(switchyard: Switchyard, tmp_path: Path) -> None:
    demo_seed(weights=None, ingress_port=8080, now=rows.NOW)
    Region.objects.filter(name="us-east-1").update(spares={"local.cpu": {"warm": 2, "repair_only": 1}})
    exported = switchyard("export")
    assert exported.code == 0, exported.err
    file = tmp_path / "exported.yaml"
    file.write_text(exported.out)
    again = switchyard("plan", "-f", str(file))
    assert again.code == 0, again.err
    # two regions, two models, seven versions, two deployments and their policies
    assert again.out.startswith("0 steps to do, 15 unchanged")
    (one,) = json.loads(switchyard("export", "deployments", "sim-70b", "-o", "json").out)
    assert one["spec"]["regions"][0] == {"region": "us-east-1", "cells": 2}
    assert switchyard("export", "nodes").code == 2


def test_a_rollout_is_part_of_a_plan(switchyard: Switchyard, fleet: Path) -> None:
    rows.version("2")
    fleet.write_text(TWO_CELLS.replace("spec:\n  regions", "spec:\n  model_version: sim-70b@2\n  regions", 1))
    assert "> roll out Deployment sim-70b" in switchyard("plan", "-f", str(fleet)).out
    assert switchyard("apply", "-f", str(fleet), "--yes").code == 0
    assert Rollout.objects.get().to_version.reference == "sim-70b@2"
