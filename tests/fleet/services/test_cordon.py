from collections.abc import Callable
from typing import Any

import pytest

from fleet.models import Node
from fleet.services.node_actions import node_cordon, node_uncordon
from kernel.models import Event
from kernel.refusals import Conflict
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def test_cordoning_is_recorded_and_rings_the_reconciler(django_capture_on_commit_callbacks: Callable[..., Any]) -> None:
    rows.node("n-00000001")
    with django_capture_on_commit_callbacks() as callbacks:
        assert node_cordon(node_id="n-00000001", actor="ada", now=NOW)
    assert Node.objects.get().cordoned
    assert Event.objects.get().tone == "warn"
    assert callbacks


@pytest.mark.parametrize(("service", "cordoned"), [(node_cordon, True), (node_uncordon, False)])
def test_repeating_it_changes_and_records_nothing(
    service: Callable[..., bool], cordoned: bool, django_capture_on_commit_callbacks: Callable[..., Any]
) -> None:
    rows.node("n-00000001", cordoned=cordoned)
    with django_capture_on_commit_callbacks() as callbacks:
        assert not service(node_id="n-00000001", actor="ada", now=NOW)
    assert not Event.objects.exists()
    assert not callbacks


def test_what_runs_on_a_cordoned_node_is_left_alone() -> None:
    node = rows.node("n-00000001")
    rows.cell("c", node)
    node_cordon(node_id=node.id, actor="ada", now=NOW)
    after = Node.objects.get()
    assert (after.state, after.desired_version, after.member.cell_id) == ("ready", node.desired_version, "c")


def test_a_retired_node_cannot_be_cordoned() -> None:
    rows.node("n-00000001", state="retired")
    with pytest.raises(Conflict, match="n-00000001 is retired"):
        node_cordon(node_id="n-00000001", actor="ada", now=NOW)
