"""`manage.py ca_rotate` says how far a rotation is, and what it waits for."""

from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind
from fleet.agents.models import FleetAuthority
from fleet.agents.services.authority import CertificateOrder, certificate_issue
from fleet.nodes.models import AgentCredential
from kernel import clock


def rotate(*arguments: str) -> str:
    out = StringIO()
    call_command("ca_rotate", *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.django_db
def test_without_agents_the_next_authority_signs_at_once() -> None:
    assert "is made; agents receive it now" in rotate()
    assert "no rotation is under way" in rotate("--status")
    assert FleetAuthority.objects.filter(state="current").count() == 1


@pytest.mark.django_db
def test_it_names_who_does_not_believe_the_next_one_and_goes_on_by_force(tmp_path: Path) -> None:
    AgentCredential.objects.create(
        prefix="p", digest="d", kind="node", subject="n-1", region="r", created_at=clock.now()
    )
    order = CertificateOrder(IdentityKind.NODE, "n-1", Identity(tmp_path).signing_request())
    certificate_issue(order, now=clock.now())
    with pytest.raises(CommandError, match="not all agents trust the next authority after 0 s"):
        rotate("--wait-s", "0")
    assert "the next authority signs once these trust it (1): node n-1" in rotate("--status")
    answer = rotate("--force")
    assert "is in rotation already" in answer
    assert "the previous one is trusted until its last certificate has expired" in answer
