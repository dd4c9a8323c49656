"""The commands against the real API: output, effects and exit codes."""

import json
import re
from pathlib import Path

import pytest

from accounts.models import Approval, ApprovalRule
from controlplane.observability import views
from fleet.autoscaling.models import ScalingSwitch
from fleet.cells.models import Cell
from fleet.deployments.models import DeploymentRegion
from fleet.faults.models import Incident
from fleet.machines.models import Invitation
from fleet.nodes.models import Node
from fleet.regions.models import Region
from fleet.releases.models import AgentRelease, AgentRollout
from fleet.rollouts.models import Rollout
from kernel.control_hosts import control_host_seen
from kernel.loop_passes import loop_passed
from kernel.models import Event, LoopPass
from tests.controlplane.cli.conftest import Switchyard
from tests.fleet import rows
from tests.fleet.pools import TYPE, pool
from traffic.region_shares.models import TrafficOverride
from traffic.routing.models import Ingress

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture
def cell() -> Cell:
    return rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"), rows.node("n-00000002"))


def test_a_list_is_a_table_for_people_and_json_for_programs(switchyard: Switchyard, cell: Cell) -> None:
    shown = switchyard("get", "cells")
    assert shown.code == 0
    assert shown.out.splitlines()[1].split()[:4] == [cell.id, "ready", "sim-70b@1", "us-east-1"]
    (row,) = json.loads(switchyard("get", "cells", "-o", "json").out)
    assert row["id"] == cell.id
    assert json.loads(switchyard("get", "cell", cell.id, "-o", "json").out) == row
    assert "- id: sim-70b-us-east-1-1" in switchyard("get", "cells", "-o", "yaml").out
    assert switchyard("get", "nodes", "-o", "name").out == "n-00000001\nn-00000002\n"


def test_lists_are_filtered_and_an_empty_one_says_so(switchyard: Switchyard, cell: Cell) -> None:
    assert cell.id in switchyard("get", "c", "-r", "us-east-1", "--state", "ready", "--where", "model=sim-70b").out
    empty = switchyard("get", "cells", "--state", "lost")
    assert (empty.code, empty.out, empty.err) == (0, "", "No cells found.\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("get", "cells", "nothing"), 4, "there is no cell 'nothing'"),
        (("get", "flowers"), 2, "unknown kind 'flowers'"),
        (("get", "cells", "--where", "color=red"), 3, "color: unknown parameter"),
        (("get", "cells", "--token", "sw_00000000000000_" + 48 * "0"), 5, "switchyard login"),
        (("get",), 2, "Missing argument"),
        (("fetch",), 2, "No such command"),
        (("rollout", "pause", "sim-70b"), 4, "'sim-70b' has no rollout"),
        (("evacuate", "us-east-1", "--for", "soon"), 2, "'soon' is not a duration"),
        (("apply", "-f", "/nowhere.yaml"), 2, "cannot read /nowhere.yaml"),
        (("scale", "sim-70b", "us-east-1"), 2, "use the form REGION=CELLS"),
        (("scale", "sim-70b", "us-east-1=2", "--on", "trn1"), 2, "give TYPE=CELLS once for each type"),
        (("scale", "sim-70b", "us-east-1=2", "--on", "trn1=1,trn1=1"), 2, "give TYPE=CELLS once for each type"),
    ],
)
def test_what_goes_wrong_has_an_exit_code_and_a_sentence(
    switchyard: Switchyard, arguments: tuple[str, ...], code: int, message: str
) -> None:
    ended = switchyard(*arguments)
    assert (ended.code, ended.out) == (code, "")
    assert message in ended.err


def test_programs_get_failures_as_json(switchyard: Switchyard) -> None:
    ended = switchyard("-o", "json", "get", "cells", "nothing")
    failure = json.loads(ended.err)
    assert (failure["status"], failure["exit_code"]) == (404, 4)


def test_status_says_how_far_behind_the_control_loops_are(
    switchyard: Switchyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "HEALTH_KEPT_S", -1.0)
    LoopPass.objects.all().delete()
    loop_passed("fleet.reconcile")
    shown = switchyard("status")
    assert shown.code == 0
    assert re.fullmatch(r"control loops: last pass \d+ s ago\n", shown.out)
    assert "There are no open incidents." in shown.err
    assert set(json.loads(switchyard("status", "-o", "json").out)["loops"]) == {"fleet.reconcile"}


def test_status_says_what_moves_and_what_waits(switchyard: Switchyard, cell: Cell) -> None:
    Cell.objects.update(state="draining", reason="scaled down")
    ScalingSwitch.objects.create(paused=True, why="a test of load", actor="ada", changed_at=rows.NOW)
    shown = switchyard("status").out
    assert f"in progress: Drain: {cell.id}, draining (scaled down)" in shown
    assert "needs a person: Autoscaler: The autoscaler is paused, by ada (a test of load)" in shown
    document = json.loads(switchyard("status", "-o", "json").out)
    assert (document["in_progress"][0]["url"], len(document["waiting"])) == (f"/cells/{cell.id}/", 1)


def test_status_says_how_two_control_hosts_are(switchyard: Switchyard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "HEALTH_KEPT_S", -1.0)
    control_host_seen("control-1")
    control_host_seen("control-2")
    assert "control hosts: control-1, control-2" in switchyard("status").out


def test_one_thing_is_described_with_its_events(switchyard: Switchyard, cell: Cell) -> None:
    Event.objects.create(at=rows.NOW, kind="cell.ready", message="all 2 ranks are ready", cell=cell.id)
    shown = switchyard("describe", "cell", cell.id).out
    assert "deployment:" in shown
    assert "n-00000002  1     follower" in shown
    assert "all 2 ranks are ready" in shown


def test_cells_and_nodes_are_drained_by_their_names(switchyard: Switchyard, cell: Cell) -> None:
    rows.node("n-00000003")
    assert "n-00000003 is ready, cordoned" in switchyard("cordon", "n-00000003", "--why", "fan").out
    assert "n-00000003 is ready" in switchyard("uncordon", "n-00000003").out
    drained = switchyard("drain", cell.id, "--why", "new driver")
    assert (drained.code, drained.out.partition(":")[0]) == (0, f"cell {cell.id} is draining")
    again = switchyard("drain", f"cell/{cell.id}")
    assert again.code == 6
    assert "drain needs a cell that is ready" in again.err
    assert switchyard("drain", "neither").code == 4


def test_a_node_is_drained_by_its_id(switchyard: Switchyard, cell: Cell) -> None:
    assert switchyard("drain", "n-00000001").code == 0
    assert Node.objects.get(id="n-00000001").cordoned
    assert Cell.objects.get().state == "draining"


def test_a_node_is_revoked_once_its_name_was_typed_and_nothing_else_is(switchyard: Switchyard, cell: Cell) -> None:
    rows.node("n-00000003")
    assert switchyard("revoke", "n-00000003", "--why", "stolen").code != 0
    assert Node.objects.get(id="n-00000003").state == "ready"
    assert "n-00000003 is faulty, cordoned" in switchyard("revoke", "n-00000003", "--why", "stolen", "--yes").out
    refused = switchyard("revoke", "x-1", "--yes")
    assert "'x-1' is not a node (n-…), an ingress (i-…) or a machine (m-…)" in refused.err


def test_an_invitation_is_withdrawn_by_its_prefix(switchyard: Switchyard) -> None:
    rows.region("pool", provider="machines")
    assert switchyard("machine", "add", "--region", "pool").code == 0
    prefix = Invitation.objects.get().prefix
    assert f"invitation {prefix} is withdrawn" in switchyard("machine", "withdraw", prefix, "--why", "mailed").out
    assert "withdrawn" in switchyard("get", "invitations").out
    assert switchyard("machine", "withdraw", prefix).code == 6


def test_agents_go_to_another_release_and_back(switchyard: Switchyard) -> None:
    assert switchyard("agents", "status").code == 4
    for name, current in (("0" * 16, True), ("1" * 16, False)):
        AgentRelease.objects.create(id=name, version="1", protocol=2, is_current=current, created_at=rows.NOW)
    rows.node("n-00000001", report={"agent_version": f"1+{'0' * 16}"})
    assert "n-00000001" in switchyard("get", "agent-releases").out
    begun = switchyard("agents", "upgrade", "--to", "1" * 16, "--soak", "5s")
    assert f"to {'1' * 16} is in progress, ring 1 of 1, 0 of 1 agent well" in begun.out
    assert "ring 1: n-00000001" in switchyard("agents", "status").out
    assert "goes back" in switchyard("agents", "cancel", "--why", "not today").out
    assert switchyard("agents", "cancel").code == 6
    AgentRollout.objects.update(state="rolled_back", ended_at=rows.NOW)
    assert switchyard("agents", "status").code == 10


def test_what_cuts_requests_needs_confirmation(switchyard: Switchyard, cell: Cell) -> None:
    refused = switchyard("restart", cell.id)
    assert (refused.code, refused.err.count("pass --yes")) == (2, 1)
    assert Cell.objects.get().state == "ready"
    assert switchyard("restart", cell.id, "--yes").code == 0
    assert Cell.objects.get().state != "ready"


@pytest.mark.usefixtures("cell")
def test_cells_are_put_on_types_by_hand_and_back(switchyard: Switchyard) -> None:
    shown = switchyard("scale", "sim-70b", "us-east-1=2", "--on", "local.cpu=2")
    assert (shown.out, shown.err) == ("deployment sim-70b: us-east-1 1/2 cells ready\n", "")
    assert DeploymentRegion.objects.get().by_type == {"local.cpu": 2}
    assert "predicted for sim-70b" in switchyard("scale", "sim-70b", "us-east-1=2", "--on", "any", "--dry-run").out
    assert DeploymentRegion.objects.get().by_type == {"local.cpu": 2}
    refused = switchyard("scale", "sim-70b", "us-east-1=2", "--on", "trn1=1")
    assert (refused.code, "'trn1' is not one of its instance types" in refused.err) == (3, True)
    assert switchyard("scale", "sim-70b", "us-east-1=2", "--on", "any").code == 0
    assert DeploymentRegion.objects.get().by_type == {}


def test_scaling_is_foretold_and_done(switchyard: Switchyard, cell: Cell) -> None:
    assert "predicted for sim-70b" in switchyard("scale", "sim-70b", "us-east-1=2", "--dry-run").out
    assert DeploymentRegion.objects.get().cells == 1
    assert switchyard("scale", "sim-70b", "us-east-1=2").out == "deployment sim-70b: us-east-1 1/2 cells ready\n"


def test_a_rollout_is_started_paused_resumed_and_taken_back(switchyard: Switchyard, cell: Cell) -> None:
    rows.version("2")
    DeploymentRegion.objects.update(cells=2)
    assert "canary" in switchyard("rollout", "start", "sim-70b", "sim-70b@2", "--dry-run").out
    begun = switchyard("rollout", "start", "sim-70b", "sim-70b@2", "--policy", "bake_s=7", "--why", "faster")
    assert begun.code == 0, begun.err
    row = Rollout.objects.get()
    assert (row.policy["bake_s"], row.why) == (7.0, "faster")
    assert "is paused" in switchyard("rollout", "pause", "sim-70b").out
    watched = switchyard("rollout", "watch", str(row.pk))
    assert watched.code == 10
    assert f"switchyard rollout resume {row.pk}" in watched.err
    assert "is running" in switchyard("rollout", "resume", "sim-70b").out
    assert switchyard("rollout", "watch", "sim-70b", "--for", "0").code == 9
    assert switchyard("rollout", "skip-bake", "sim-70b", "--why", "sure").code == 6
    assert "is rolling_back" in switchyard("rollout", "roll-back", "sim-70b").out
    assert "is failed" in switchyard("rollout", "abort", "sim-70b").out
    assert switchyard("rollout", "watch", str(row.pk)).code == 10


def test_a_region_is_evacuated_after_its_effect_was_shown(switchyard: Switchyard, cell: Cell) -> None:
    rows.deployment(where="us-west-2")
    for region in Region.objects.all():
        Ingress.objects.create(id=f"i-{region.name}", region=region, address="a", port=1, created_at=rows.NOW)
    shown = switchyard("evacuate", "us-east-1", "--dry-run")
    assert shown.code == 0, shown.err
    refused = switchyard("evacuate", "us-east-1")
    assert (refused.code, "pass --yes" in refused.err) == (2, True)
    assert not TrafficOverride.objects.exists()
    assert "evacuation" in switchyard("evacuate", "us-east-1", "--for", "15m", "--why", "fire", "--yes").out
    order = TrafficOverride.objects.get()
    assert (order.mode, order.why, (order.expires_at - order.created_at).total_seconds()) == ("real", "fire", 900)
    assert "has ended" in switchyard("evacuate", "us-east-1", "--end").out
    assert switchyard("evacuate", "us-east-1", "--end").code == 4


def test_events_come_oldest_first_and_one_a_line_for_programs(switchyard: Switchyard) -> None:
    for number in range(3):
        Event.objects.create(at=rows.NOW, kind="k", message=f"event {number}", deployment="d")
    lines = switchyard("events", "-n", "2", "-d", "d").out.splitlines()
    assert [line.rpartition("  ")[2].strip()[-7:] for line in lines] == ["event 1", "event 2"]
    objects = [json.loads(line) for line in switchyard("events", "-o", "json").out.splitlines()]
    assert [one["message"] for one in objects][-3:] == ["event 0", "event 1", "event 2"]


def test_the_load_of_cells_is_listed(switchyard: Switchyard, cell: Cell) -> None:
    assert switchyard("top").out.splitlines()[1].split()[:2] == [cell.id, "ready"]
    assert switchyard("top", "deployments").out.splitlines()[1].split()[:3] == ["sim-70b", "1", "1"]


def test_an_incident_is_dismissed(switchyard: Switchyard) -> None:
    incident = Incident.objects.create(kind="k", subject="s", summary="s", opened_at=rows.NOW)
    assert "is closed" in switchyard("dismiss", str(incident.pk), "--why", "a drill").out


def test_an_incident_is_taken_over_and_reported(switchyard: Switchyard, tmp_path: Path) -> None:
    number = str(Incident.objects.create(kind="node-lost", subject="s", summary="Node s lost", opened_at=rows.NOW).pk)
    assert "is acknowledged by" in switchyard("incident", "acknowledge", number).out
    again = switchyard("incident", "acknowledge", number)
    assert (again.code, "was acknowledged by" in again.err) == (6, True)
    assert "there is no active user 'nobody'" in switchyard("incident", "assign", number, "nobody").err
    assert "has 1 notes" in switchyard("incident", "note", number, "rack 7").out
    # An open incident lasts until now, so two reports of it differ.
    assert "is closed" in switchyard("dismiss", number, "--why", "a drill").out
    shown = switchyard("incident", "report", number)
    assert shown.out.startswith(f"# Incident {number}: Node s lost\n")
    assert "rack 7" in shown.out
    assert switchyard("incident", "report", number, "--to", str(tmp_path / "r.md")).code == 0
    assert (tmp_path / "r.md").read_text() == shown.out
    assert json.loads(switchyard("incident", "report", number, "-o", "json").out)["steps"][0]["phase"] == "cause"
    assert switchyard("incident", "report", "999999").code == 4


def test_tokens_are_made_listed_and_revoked(switchyard: Switchyard) -> None:
    made = switchyard("create", "token", "ci", "--scope", "write", "--expires-in-days", "3")
    assert made.code == 0, made.err
    text = made.out.strip()
    assert text.startswith("sw_")
    prefix = text.split("_")[1]
    assert text not in made.err
    listed = switchyard("get", "tokens").out
    assert prefix in listed
    assert text not in listed
    assert switchyard("get", "cells", "--token", text).code == 0
    assert switchyard("token", "revoke", prefix).code == 0
    assert switchyard("get", "cells", "--token", text).code == 5


def test_login_stores_a_profile_that_later_commands_use(
    switchyard: Switchyard, environ: dict[str, str], tmp_path: Path
) -> None:
    assert "You are operator (admin)" in switchyard("login", "http://testserver", "--as", "test").out
    file = tmp_path / ".config" / "switchyard" / "profiles.json"
    assert file.stat().st_mode & 0o777 == 0o600
    del environ["SWITCHYARD_TOKEN"], environ["SWITCHYARD_SERVER"]
    assert "token from profile test" in switchyard("whoami").out
    assert switchyard("profiles").out.splitlines()[1].split() == ["test", "http://testserver", "yes"]
    assert switchyard("logout").code == 0
    assert switchyard("profiles").err == "No profile is stored; `switchyard login` creates one.\n"


def test_a_wrong_token_is_not_stored(switchyard: Switchyard, environ: dict[str, str], tmp_path: Path) -> None:
    environ["SWITCHYARD_TOKEN"] = "sw_00000000000000_" + 48 * "0"
    assert switchyard("login", "http://testserver").code == 5
    assert not (tmp_path / ".config").exists()


def test_versions_go_from_draft_to_retired(switchyard: Switchyard) -> None:
    rows.version("2", state="draft", golden_waiver="none yet")
    assert "is running" in switchyard("model", "validate", "sim-70b@2").out
    assert switchyard("model", "release", "sim-70b@2", "--why", "w").code == 6
    rows.version("3", state="validated")
    assert "sim-70b@3 is released" in switchyard("model", "release", "sim-70b@3", "--why", "a week on canaries").out
    assert "sim-70b@3 is retired" in switchyard("model", "retire", "sim-70b@3", "--why", "old").out


def test_shells_get_a_script(switchyard: Switchyard) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_SWITCHYARD_COMPLETE" in switchyard("completion", shell).out


def test_the_last_lines_of_a_log_are_shown(switchyard: Switchyard, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.cli.commands.observe.FOLLOW_EVERY_S", 0.0)
    nothing = switchyard("logs", cell.id)
    assert (nothing.code, nothing.err) == (0, f"{cell.id} has no log lines of its engine.\n")
    assert switchyard("logs", cell.id, "--source", "kernel").code == 3
    rows.node("n-00000003")
    assert switchyard("logs", "n-00000003").code == 6


def test_scaling_that_empties_a_region_waits(switchyard: Switchyard, cell: Cell) -> None:
    rows.deployment(cells=1)
    ApprovalRule.objects.create(action="evacuate-region", required=True, actor="ada", changed_at=rows.NOW)
    scaled = switchyard("scale", "sim-70b", "us-east-1=0")
    assert (scaled.code, f"switchyard approve {Approval.objects.get().pk}" in scaled.err) == (11, True)


def test_what_needs_two_person_approval_waits(switchyard: Switchyard, cell: Cell, tmp_path: Path) -> None:
    rows.deployment(where="us-west-2")
    rows.version("2")
    ApprovalRule.objects.create(action="roll-out-everywhere", required=True, actor="ada", changed_at=rows.NOW)
    started = switchyard("rollout", "start", "sim-70b", "sim-70b@2")
    assert started.code == 11
    assert f"switchyard approve {Approval.objects.get().pk}" in started.err
    own = switchyard("approve", str(Approval.objects.get().pk))
    assert (own.code, "you cannot approve your own request" in own.err) == (6, True)
    assert "is withdrawn" in switchyard("reject", str(Approval.objects.get().pk)).out
    file = tmp_path / "fleet.yaml"
    document = {"apiVersion": "switchyard/v1", "kind": "Deployment", "metadata": {"name": "sim-70b"}}
    file.write_text(json.dumps({**document, "spec": {"model_version": "sim-70b@2"}}))
    assert "! needs approval" in switchyard("plan", "-f", str(file)).out
    applied = switchyard("apply", "-f", str(file), "--yes")
    assert (applied.code, Rollout.objects.exists()) == (11, False)


def test_a_region_of_a_cloud_is_created_and_waits_for_its_stack(switchyard: Switchyard) -> None:
    created = switchyard("region", "create", "us-west-2", "--provider", "aws", "--stack", "switchyard-us-west-2")

    assert created.code == 0
    assert "region us-west-2 is reading" in created.out
    assert switchyard("region", "create", "eu-north-1", "--provider", "aws").code != 0


def test_pools_of_a_region_are_listed_in_order_and_set(switchyard: Switchyard) -> None:
    first = pool(0)
    assert switchyard("pool", "add", "us-east-1", TYPE, "us-east-1a", "--position", "0").code == 0
    listed = switchyard("region", "pools", "us-east-1").out.splitlines()[1:]
    assert [line.split()[4] for line in listed] == ["spot", "on_demand"]
    assert "operator" in listed[0]
    disabled = switchyard("pool", "disable", str(first.pk), "--why", "trouble")
    assert disabled.out == f"pool {first.pk}, {TYPE} on_demand in us-east-1a, is off, position 1\n"
    assert switchyard("pool", "move", str(first.pk), "0").code == 0
    assert switchyard("pool", "enable", str(first.pk)).code == 0
    assert switchyard("pool", "resume", str(first.pk)).code == 0
    refused = switchyard("pool", "remove", str(first.pk))
    assert (refused.code, refused.out) == (6, "")
    assert "disable it instead" in refused.err
    spot = json.loads(switchyard("region", "pools", "us-east-1", "--market", "spot", "-o", "json").out)[0]["id"]
    assert switchyard("pool", "price", str(spot), "9.5").code == 0
    assert "is removed" in switchyard("pool", "remove", str(spot)).out
    assert switchyard("region", "pools", "mars").err == (
        "mars has no such pool; for provider aws the region's stack defines them.\n"
    )


def test_images_of_a_region_are_listed_moved_and_turned_back(switchyard: Switchyard) -> None:
    pool(0)
    newer = "ami-0123456789abcdef0"
    asked = switchyard("image", "move", "us-east-1", TYPE, newer, "--why", "a driver")
    assert (asked.code, asked.out.split(" ", 2)[2]) == (0, f"of {TYPE} in us-east-1 to {newer} is asked\n")
    [line] = switchyard("region", "images", "us-east-1").out.splitlines()[1:]
    assert line.split()[:4] == [TYPE, "ami-1", newer, "asked"]
    assert switchyard("image", "move", "us-east-1", TYPE).code == 6, "one is under way"
    assert "is refused: cancelled before it began" in switchyard("image", "back", "us-east-1", TYPE).out
    again = switchyard("image", "back", "us-east-1", TYPE)
    assert (again.code, again.err) == (6, f"switchyard: no active move of {TYPE} in us-east-1\n")
    assert json.loads(switchyard("region", "images", "us-east-1", "-o", "json").out)[0]["move"]["state"] == "refused"
    assert switchyard("region", "images", "mars").err == "mars has no capacity pools, and so no images.\n"
