"""Certificates for applications over HTTP, on the page and by command: permissions and errors, without any key."""

import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.test import Client
from rest_framework.test import APIClient

from audit.models import AuditRecord
from fleet.agents.models import ApplicationCertificate
from fleet.faults.models import Incident
from fleet.regions.selectors import application_tls
from fleet.regions.services import (
    MOST,
    application_certificate_remove,
    application_certificate_set,
    application_certificates_check,
    region_change,
)
from kernel.access import Role, Scope
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from tests.controlplane.cli.conftest import environ, kept_schema, switchyard, token  # noqa: F401 - fixtures
from tests.fleet import rows
from tests.server_certificates import DAY, PublicAuthority, Signed

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

PATH = "/api/v1/certificates"
AUTHORITY = PublicAuthority()
SERVER = AUTHORITY.server("api.example.test")
NOW = datetime.now(UTC)


def body_of(server: Signed, name: str = "api", **more: str) -> dict[str, str]:
    return {"name": name, "certificate": AUTHORITY.chain(server), "private_key": server.key_pem, **more}


def put(server: Signed, name: str = "api", region: str = "", now: datetime = NOW) -> ApplicationCertificate:
    return application_certificate_set(
        name=name,
        certificate=AUTHORITY.chain(server),
        private_key=server.key_pem,
        region=region,
        actor="ada",
        now=now,
    )


def kept_of(server: Signed) -> list[str]:
    """Lines of its key, to search for."""
    return server.key_pem.splitlines()[1:-1]


@pytest.fixture
def operator() -> APIClient:
    return calls(make_user("ada", Role.OPERATOR))


def test_an_operator_sets_one_sets_it_anew_and_removes_it(operator: APIClient) -> None:
    region = rows.region()
    shown = operator.post(PATH, body_of(SERVER, region=region.name), format="json").json()
    assert (shown["name"], shown["region"], shown["names"]) == ("api", region.name, ["api.example.test"])
    assert (shown["issuer"], shown["key_kind"], shown["actor"]) == ("CN=between", "P-256", "ada")
    assert operator.post(PATH, body_of(SERVER), format="json").json() == shown, "the same again changes nothing"
    following = AUTHORITY.server("api.example.test", "www.example.test")
    rotated = operator.post(PATH, body_of(following), format="json").json()
    assert (rotated["region"], rotated["names"]) == (region.name, ["api.example.test", "www.example.test"])
    assert operator.get(f"{PATH}/api").json() == rotated
    assert operator.get(PATH, {"region": region.name}).json()["results"] == [rotated]
    assert operator.post(f"{PATH}/api/remove").json() == rotated
    assert operator.get(f"{PATH}/api").status_code == 404
    kinds = Event.objects.filter(kind__startswith="certificate.").order_by("id").values_list("kind", flat=True)
    assert list(kinds) == ["certificate.set", "certificate.rotated", "certificate.removed"]


def test_the_key_is_in_no_answer_record_event_or_column(operator: APIClient) -> None:
    rows.region()
    following = AUTHORITY.server("api.example.test")
    answers = [operator.post(PATH, body_of(each), format="json").content.decode() for each in (SERVER, following)]
    swapped = {"name": "x", "certificate": SERVER.key_pem, "private_key": AUTHORITY.chain(SERVER)}
    answers.append(operator.post(PATH, swapped, format="json").content.decode())
    answers.append(operator.post(PATH, {**body_of(SERVER), "pem": SERVER.key_pem}, format="json").content.decode())
    answers += [operator.get(path).content.decode() for path in (PATH, f"{PATH}/api", "/api/v1/events")]
    answers.append(calls(make_user("vera")).post(PATH, body_of(SERVER), format="json").content.decode())
    records = [record.changes for record in AuditRecord.objects.all()]
    assert len(records) >= 3
    assert any("certificate" in record for record in records)
    with connection.cursor() as cursor:
        cursor.execute("SELECT to_jsonb(r)::text FROM fleet_applicationcertificate r")
        stored = [row[0] for row in cursor.fetchall()]
    said = "".join([*answers, *records, *stored, *(str(event.detail) + event.message for event in Event.objects.all())])
    assert not any(line in said for server in (SERVER, following) for line in kept_of(server))
    assert "sealed_secret" not in "".join(answers)
    assert application_tls("us-east-1", "v").certificates[0].pem == AUTHORITY.chain(following) + following.key_pem


@pytest.mark.parametrize(("user", "scope"), [(Role.VIEWER, Scope.ADMIN), (Role.ADMIN, Scope.READ), (None, Scope.ADMIN)])
def test_viewers_tokens_that_read_and_strangers_get_nothing(user: Role | None, scope: Scope) -> None:
    put(SERVER)
    caller = calls(make_user("somebody", user) if user else None, scope)
    answers = [
        caller.get(PATH),
        caller.get(f"{PATH}/api"),
        caller.post(PATH, body_of(SERVER), format="json"),
        caller.post(f"{PATH}/api/remove"),
    ]
    assert {answer.status_code for answer in answers} <= {401, 403}
    assert not any(b"api.example.test" in answer.content for answer in answers)
    assert ApplicationCertificate.objects.count() == 1


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"private_key": AUTHORITY.server("x.test").key_pem}, "private_key", "fits"),
        ({"certificate": "hello"}, "certificate", "pem"),
        ({"name": "Not A Name"}, "name", "name"),
        ({"region": "mars"}, "region", "exists"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_kept(
    operator: APIClient, change: dict[str, str], field: str, rule: str
) -> None:
    rows.region()
    answer = operator.post(PATH, {**body_of(SERVER), **change}, format="json")
    assert (answer.status_code, rules(answer)) == (400, {field: rule})
    assert not ApplicationCertificate.objects.exists()


def test_two_certificates_of_a_region_are_never_for_the_same_host() -> None:
    east, west = rows.region("us-east-1").name, rows.region("us-west-2").name
    put(SERVER, "east", east)
    put(AUTHORITY.server("api.example.test"), "west", west)
    with pytest.raises(Conflict, match=r"certificate east of us-east-1 has the host api.example.test already"):
        put(AUTHORITY.server("other.test", "api.example.test"), "everywhere")
    with pytest.raises(Conflict, match="certificate west is of us-west-2: remove it there first"):
        put(AUTHORITY.server("api.example.test"), "west", east)
    put(AUTHORITY.server("other.test"), "everywhere")
    assert [each.name for each in application_tls(east, "v").certificates] == ["east", "everywhere"]
    assert [each.name for each in application_tls(west, "v").certificates] == ["west", "everywhere"]


def test_there_is_a_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.regions.services.MOST", 1)
    assert MOST == 32
    put(SERVER)
    with pytest.raises(Conflict, match="there are 1 certificates, which is the limit"):
        put(AUTHORITY.server("other.test"), "other")


def test_a_region_refuses_plain_http_only_while_it_has_a_certificate(operator: APIClient) -> None:
    region = rows.region()
    path = f"/api/v1/regions/{region.name}"
    assert operator.get(path).json()["plain_http"] == "serve"
    refused = operator.patch(path, {"plain_http": "refuse"}, format="json")
    assert (refused.status_code, rules(refused)) == (400, {"plain_http": "certificate"})
    put(SERVER)
    assert operator.patch(path, {"plain_http": "loopback"}, format="json").json()["plain_http"] == "loopback"
    assert application_tls(region.name, "v").plain_http == "loopback"
    answer = operator.post(f"{PATH}/api/remove")
    assert answer.status_code == 409
    assert "the last one of us-east-1, which refuses plain HTTP" in answer.json()["detail"]
    operator.patch(path, {"plain_http": "serve"}, format="json")
    assert operator.post(f"{PATH}/api/remove").status_code == 200


def incidents(**columns: Any) -> list[str]:
    return list(Incident.objects.filter(**columns).order_by("id").values_list("kind", flat=True))


def test_an_end_opens_an_incident_fourteen_days_and_a_day_before_and_the_next_certificate_closes_it() -> None:
    row = put(AUTHORITY.server("api.example.test", valid=31 * DAY))
    assert incidents() == []
    application_certificates_check(now=row.not_after - timedelta(days=13))
    assert incidents(state="open") == ["certificate-ends-soon"]
    application_certificates_check(now=row.not_after - timedelta(hours=12))
    assert incidents(state="open") == ["certificate-ends-now"]
    put(AUTHORITY.server("api.example.test", valid=400 * DAY), now=row.not_after - timedelta(hours=6))
    assert incidents(state="open") == []
    assert len(incidents()) == 2


def test_one_that_ends_soon_is_an_incident_at_once_and_its_removal_ends_that(operator: APIClient) -> None:
    put(AUTHORITY.server("api.example.test", valid=3 * DAY))
    assert incidents(state="open") == ["certificate-ends-soon"]
    operator.post(f"{PATH}/api/remove")
    assert incidents(state="open") == []


def test_the_page_of_traffic_shows_operators_names_and_ends_and_viewers_nothing() -> None:
    put(SERVER)
    for role, may in ((Role.OPERATOR, True), (Role.VIEWER, False)):
        browser = Client()
        browser.force_login(make_user(f"a-{role}", role))
        page = browser.get("/traffic/").content.decode()
        assert ("api.example.test" in page) is may
        assert ("CN=between" in page) is may
        assert not any(line in page for line in kept_of(SERVER))


def test_commands_set_list_show_and_remove(switchyard: Any, tmp_path: Path) -> None:  # noqa: F811 - a fixture
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_text(AUTHORITY.chain(SERVER))
    key.write_text(SERVER.key_pem)
    files = ("--certificate", str(chain), "--key", str(key))
    ended = switchyard("certificate", "set", "api", *files)
    assert (ended.code, ended.err) == (0, "")
    assert "certificate api: api.example.test, until 20" in ended.out
    assert "api.example.test" in switchyard("get", "certificates").out
    assert re.search(r"issuer: +CN=between", switchyard("describe", "certificate", "api").out)
    mixed = switchyard("certificate", "set", "api", "--certificate", str(key), "--key", str(key))
    assert (mixed.code, "send it as the key" in mixed.err) == (3, True)
    missing = switchyard("certificate", "set", "api", "--certificate", str(tmp_path / "no.pem"), "--key", str(key))
    assert (missing.code, "no.pem cannot be read: No such file" in missing.err) == (2, True)
    assert switchyard("certificate", "remove", "api", "--yes").out == "certificate api is removed\n"
    assert not ApplicationCertificate.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_who_refuses_plain_http_and_who_removes_the_last_certificate_wait_for_each_other() -> None:
    region = rows.region()
    put(SERVER)
    removed, go_on = threading.Event(), threading.Event()

    def remove() -> None:
        with transaction.atomic():
            application_certificate_remove(name="api", actor="ada", now=NOW)
            removed.set()
            assert go_on.wait(60)
        connection.close()

    removing = threading.Thread(target=remove)
    removing.start()
    try:
        assert removed.wait(60)
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '200ms'")
        with pytest.raises(OperationalError, match="lock timeout"):
            region_change(name=region.name, columns={"plain_http": "refuse"}, actor="bo", now=NOW)
    finally:
        go_on.set()
        removing.join()
        with connection.cursor() as cursor:
            cursor.execute("RESET lock_timeout")
    with pytest.raises(InvalidInput, match="has no certificate for applications"):
        region_change(name=region.name, columns={"plain_http": "refuse"}, actor="bo", now=NOW)
