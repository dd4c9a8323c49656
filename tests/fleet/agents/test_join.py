"""Requests of a host without a credential: with an open invitation, and about its own address only."""

import contextlib
import gc
import hashlib
import socket
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asgiref.sync import async_to_sync
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from engine_agent.protocol.engine_builds import BuildFacts, NeededBuild
from engine_agent.protocol.engine_builds import EngineBuild as Ordered
from fleet.agents.api import downloads
from fleet.agents.services.enrolment import credential_issue
from fleet.deployments.selectors import builds_needed
from fleet.machines.models import Invitation
from fleet.machines.services.machines import REFUSALS_PER_MIN, invitation_create
from fleet.releases.services import archive as agent_archive
from kernel import clock
from kernel.metrics import JOINS_REFUSED
from kernel.models import Event
from models_registry.builds.models import EngineBuild
from models_registry.versions.models import ModelVersion
from tests.fleet import rows
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.django_db]

NONCE = "ab" * 16


@pytest.fixture(autouse=True)
def _cache(settings: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings.SWITCHYARD_CACHE = tmp_path_factory.getbasetemp() / "archives"


@pytest.fixture
def token() -> str:
    rows.region("pool", provider="machines")
    hour = timedelta(hours=1)
    return invitation_create(region="pool", count=1, expires_in=hour, actor="ada", now=clock.now()).text


def check(token: str, body: Any) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {token}"}
    answer = Client().post("/agents/join/check", body, content_type="application/json", headers=headers)
    return answer.status_code, answer.json()


@contextlib.contextmanager
def answering(says: str) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(says.encode())

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]


def test_the_script_is_a_shell_script_with_the_archives_digest(tmp_path: Path) -> None:
    answer = Client().get("/join")
    text = answer.content.decode()
    (tmp_path / "join.sh").write_text(text)
    assert subprocess.run(["sh", "-n", tmp_path / "join.sh"], check=False).returncode == 0
    assert "SERVER='http://testserver'" in text
    assert text.rstrip().endswith('main "$@"')  # a truncated script does nothing


def test_a_host_is_told_what_it_joins_and_whether_it_is_reached(token: str) -> None:
    with answering(NONCE) as port:
        status, found = check(token, {"port": port, "nonce": NONCE})
    assert status == 200
    assert (found["region"], found["role"], found["address"], found["trouble"]) == ("pool", "node", "127.0.0.1", "")


def test_a_host_is_told_the_builds_that_deployments_of_its_region_name(token: str) -> None:
    row = rows.deployment(where="pool")
    asks = {"port": 0, "nonce": NONCE}
    assert check(token, asks)[1]["builds"] == [], "an engine that no build provides may be installed"
    facts = BuildFacts("sim", "1", "cpu", "bin/python", "3.11.7", "x86_64", "2.35", 2, 1, 1, cpu_flags=("avx2",))
    EngineBuild.objects.create(
        name="sim-1", uri="s3://private/sim-1", actor="ada", created_at=rows.NOW, **msgspec.to_builtins(facts)
    )
    ModelVersion.objects.filter(pk=row.model_version_id).update(engine_build="sim-1")
    [found] = check(token, asks)[1]["builds"]
    assert msgspec.convert(found, NeededBuild) == NeededBuild("cpu", Ordered("sim-1", facts=facts))
    assert "private" not in str(found), "where it is stored is for agents"
    with CaptureQueriesContext(connection) as queries:
        assert builds_needed("pool", "local.cpu") == builds_needed("pool")
    assert len(queries) == 6
    assert builds_needed("pool", "another") == builds_needed("elsewhere") == ()
    Invitation.objects.update(role="ingress")
    assert check(token, asks)[1]["builds"] == []


def test_what_answers_in_its_place_is_not_it(token: str) -> None:
    with answering("SSH-2.0-OpenSSH_9.2 and more") as port:
        _, found = check(token, {"port": port, "nonce": NONCE})
    assert found["trouble"] == f"something else answers at 127.0.0.1:{port}"


def test_what_does_not_answer_is_said(token: str) -> None:
    port = free_port()
    _, found = check(token, {"port": port, "nonce": NONCE})
    assert found["trouble"] == f"nothing answers at 127.0.0.1:{port}"


@pytest.mark.parametrize(
    "body",
    [
        {"port": 22, "nonce": NONCE},
        {"port": "80", "nonce": NONCE},
        {"port": 70000, "nonce": NONCE},
        {"port": True, "nonce": NONCE},
        {"port": 2000, "nonce": "x"},
        {"port": 2000, "nonce": NONCE + "\n"},
        {"port": 2000, "address": "10.0.0.1"},
        [],
    ],
)
def test_nothing_else_can_be_asked(token: str, body: Any) -> None:
    status, found = check(token, body)
    assert status == 400
    assert found["error"].startswith('the body must be {"port": 0 or 1024 to 65535')


def test_nothing_is_had_without_an_open_invitation(token: str) -> None:
    Invitation.objects.update(left=0)
    refused = check(token, {"port": 0, "nonce": NONCE})
    assert refused == (
        403,
        {"error": "this token was for one host and is used up; `switchyard machine add` makes a new one"},
    )
    assert check("nonsense", {"port": 0, "nonce": NONCE})[0] == 403
    assert Client().get("/agents/join/archive/cp311-x86_64").status_code == 403
    messages = Event.objects.filter(kind="machine.refused").order_by("id").values_list("message", flat=True)
    assert [message.partition(": ")[0] for message in messages] == [
        "a host at 127.0.0.1 did not join pool",
        "a host at 127.0.0.1 could not join",
    ]


def test_strangers_do_not_fill_the_timeline_and_who_was_invited_writes_a_few_events(token: str) -> None:
    Invitation.objects.update(left=0)
    unknown = JOINS_REFUSED.labels("unknown")
    before = unknown._value.get()
    for number in range(30):
        check(f"sw_{number:014x}_{48 * '0'}", {"port": 0, "nonce": NONCE})
        body = {"reason": f"reason {number}"}
        for known in (f"sw_{number:014x}_{48 * '1'}", token):
            headers = {"Authorization": f"Bearer {known}"}
            Client().post("/agents/join/refused", body, content_type="application/json", headers=headers)
    refusals = Event.objects.filter(kind="machine.refused")
    assert refusals.filter(detail={"invitation": ""}).count() == 1
    assert refusals.count() == 1 + REFUSALS_PER_MIN
    assert unknown._value.get() == before + 60


def test_an_archive_is_for_who_was_invited(token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    missing = Client().get("/agents/join/archive/cp399-x86_64", headers=headers)
    assert missing.status_code == 404
    assert "`manage.py agent_archive cp399-x86_64` fetches one" in missing.json()["error"]


def test_why_a_host_did_not_join_is_an_event(token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    body = {"reason": "port 21003 is in use"}
    answer = Client().post("/agents/join/refused", body, content_type="application/json", headers=headers)
    assert answer.status_code == 204
    event = Event.objects.get(kind="machine.refused")
    assert event.message == "a host at 127.0.0.1 did not join pool: port 21003 is in use"


def give_back(answer: Any) -> None:
    """Closes a response without closing the database connection of the test."""
    for close in answer._resource_closers:
        close()


def digest_of(answer: Any) -> str:
    async def read() -> bytes:
        return b"".join([chunk async for chunk in answer.streaming_content])

    content = async_to_sync(read)()
    give_back(answer)
    return hashlib.sha256(content).hexdigest()


def release(path: str, credential: str) -> Any:
    return Client().get(f"/agents/releases/{path}", headers={"Authorization": f"Bearer {credential}"})


def test_a_download_that_is_dropped_gives_its_place_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Django drops a response, unclosed, if the host disconnected while the view ran."""
    packed = agent_archive.AgentArchive("cp311-x86_64", tmp_path / "agent.tar.gz", "5e" * 32)
    packed.path.write_bytes(b"packed")
    monkeypatch.setattr(downloads, "_downloading", threading.BoundedSemaphore(1))
    for _ in range(2):
        dropped = downloads.download_response(packed)
        assert (dropped.status_code, dropped["Content-Length"]) == (200, "6")
        assert downloads.download_response(packed).status_code == 503
        del dropped
        gc.collect()


def test_a_machine_fetches_the_release_that_its_order_names_and_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path
) -> None:
    settings.SWITCHYARD_HOME, settings.SWITCHYARD_CACHE = tmp_path / "home", tmp_path / "cache"
    monkeypatch.setattr(agent_archive, "_installed_files", lambda: iter(()))
    own = agent_archive.own_release()
    [packed] = agent_archive.archives(own.id)
    rows.machine("m-00000001")
    shown = {
        kind: credential_issue(kind=kind, subject=subject, region="pool", now=clock.now())
        for kind, subject in (("machine", "m-00000001"), ("node", "n-00000001"))
    }
    answer = release(f"{own.id}/{packed.digest}", shown["machine"])
    assert digest_of(answer) == packed.digest
    monkeypatch.setattr(downloads, "_downloading", threading.BoundedSemaphore(1))
    one = release(f"{own.id}/{packed.digest}", shown["machine"])
    busy = release(f"{own.id}/{packed.digest}", shown["machine"])
    assert (busy.status_code, busy["Retry-After"]) == (503, "5")
    give_back(one)
    assert digest_of(release(f"{own.id}/{packed.digest}", shown["machine"])) == packed.digest
    assert release(f"{own.id}/{'e' * 64}", shown["machine"]).status_code == 404
    assert release(f"{'.' * 16}/{packed.digest}", shown["machine"]).status_code == 404
    for credential in (shown["node"], "sw_00000000000000_nobody", ""):
        assert release(f"{own.id}/{packed.digest}", credential).status_code == 403


@pytest.mark.parametrize("path", ["agents/join/archive/cp311-x86_64", "agents/releases/0123456789abcdef/00"])
def test_who_asks_too_often_is_told_when_to_try_again(path: str, settings: Any) -> None:
    settings.API_ANONYMOUS_REQUESTS_PER_MIN = 1
    answers = [Client().get(f"/{path}") for _ in range(4)]  # one of them may be the first of the next minute
    limited = next(answer for answer in answers if answer.status_code == 429)
    assert 1 <= int(limited.headers["Retry-After"]) <= 60
