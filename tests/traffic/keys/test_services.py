"""Creation, change, rotation and revocation of application keys, and when a revoked one is refused everywhere."""

import hashlib
from datetime import datetime, timedelta
from typing import Any

import pytest

from engine_agent.protocol.ingress_messages import ApiKey
from engine_agent.protocol.states import ServingClass
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.keys.models import ApplicationKey, KeyPolicy
from traffic.keys.selectors import keys_for_ingresses
from traffic.keys.services import (
    EXPIRED_KEPT_FOR,
    NewKey,
    key_change,
    key_create,
    key_revoke,
    key_rotate,
    keys_require,
    keys_retire,
    revocations_confirm,
)
from traffic.routing.models import Ingress, IngressReport, RoutingTable
from traffic.routing.selectors import latest_tables, table_for_ingresses
from traffic.routing.services.ingresses import ingress_create
from traffic.routing.services.tables import tables_publish

pytestmark = pytest.mark.django_db
LATER = NOW + timedelta(hours=1)


def new_key(**columns: Any) -> NewKey:
    return key_create(**{"name": "search", "tenant": "rufus", "actor": "ann", "now": NOW, **columns})


def ingress(region: str = "us-east-1", name: str = "") -> Ingress:
    if name:
        return Ingress.objects.create(
            id=name, region=rows.region(region), address="127.0.0.1", port=8081, created_at=NOW
        )
    return ingress_create(region=rows.region(region), address="127.0.0.1", port=8080, now=NOW)


def acknowledge(gate: Ingress, revision: int) -> None:
    IngressReport.objects.update_or_create(ingress=gate, defaults={"connected": True, "revision": revision})


def publish(now: datetime = NOW) -> dict[str, RoutingTable]:
    tables_publish(now=now)
    return latest_tables()


def published_keys(table: RoutingTable) -> tuple[ApiKey, ...]:
    """Keys of applications in a table, without the control plane's own."""
    given = set(ApplicationKey.objects.values_list("prefix", flat=True))
    return tuple(key for key in table_for_ingresses(table).keys if key.prefix in given)


def kinds() -> list[str]:
    return list(Event.objects.order_by("id").values_list("kind", flat=True))


def test_a_key_is_stored_as_a_hash_and_its_text_is_returned_once() -> None:
    rows.deployment()
    new = new_key(deployments=["sim-70b"], serving_class=ServingClass.BATCH, requests_per_min=60)
    stored = ApplicationKey.objects.get()
    assert new.text.startswith(f"sw_{stored.prefix}_")
    assert stored.digest == hashlib.sha256(new.text.encode()).hexdigest()
    assert (stored.deployments, stored.serving_class, stored.requests_per_min) == (["sim-70b"], "batch", 60)
    event = Event.objects.get(kind="key.created")
    assert (event.actor, event.detail["tenant"]) == ("ann", "rufus")
    assert new.text not in f"{event.message} {event.detail}"


def test_a_key_for_what_is_not_there_or_that_has_expired_is_refused() -> None:
    with pytest.raises(InvalidInput, match="there is no deployment 'chat'; there are: none"):
        new_key(deployments=["chat"])
    with pytest.raises(InvalidInput, match="must be in the future"):
        new_key(expires_at=NOW)
    assert not ApplicationKey.objects.exists()


def test_every_change_publishes_a_table_with_all_keys() -> None:
    rows.deployment()
    ingress()
    assert published_keys(publish()["us-east-1"]) == ()
    first = new_key(deployments=["sim-70b"], tokens_per_min=1000, expires_at=LATER).key
    table = publish()["us-east-1"]
    (key,) = published_keys(table)
    assert (table.revision, table.reason) == (2, "keys changed")
    assert (key.prefix, key.digest, key.tenant, key.pools) == (first.prefix, first.digest, "rufus", ("sim-70b",))
    assert (key.tokens_per_min, key.expires_at) == (1000, LATER.timestamp())
    assert "digest" not in str(table.body)
    key_change(prefix=first.prefix, actor="ann", now=NOW, tokens_per_min=500)
    assert published_keys(publish()["us-east-1"])[0].tokens_per_min == 500
    keys_require(required=True, actor="ann", now=NOW)
    table = publish()["us-east-1"]
    assert (table.revision, table.reason, table_for_ingresses(table).keys_required) == (4, "keys are required", True)
    key_revoke(prefix=first.prefix, actor="ann", now=NOW)
    assert published_keys(publish()["us-east-1"]) == ()
    assert tables_publish(now=NOW) == []


def test_ingresses_of_one_region_share_the_limits_of_a_key() -> None:
    rows.deployment()
    ingress()
    ingress(name="i-second")
    new_key(requests_per_min=101, max_concurrent=1)
    (key,) = published_keys(publish()["us-east-1"])
    assert (key.requests_per_min, key.tokens_per_min, key.max_concurrent) == (51, 0, 1)


def test_changing_nothing_publishes_nothing() -> None:
    key = new_key(requests_per_min=60).key
    key_change(prefix=key.prefix, actor="ann", now=NOW, requests_per_min=60)
    keys_require(required=False, actor="ann", now=NOW)
    assert KeyPolicy.objects.get().version == 1
    assert kinds() == ["key.created"]


def test_a_rotated_key_opens_for_its_grace_beside_the_new_one() -> None:
    old = new_key(requests_per_min=60).key
    new = key_rotate(prefix=old.prefix, actor="ann", now=NOW, grace=timedelta(hours=2))
    old.refresh_from_db()
    assert (new.key.tenant, new.key.requests_per_min, new.key.expires_at) == ("rufus", 60, None)
    assert old.expires_at == NOW + timedelta(hours=2)
    assert {key.prefix for key in keys_for_ingresses()} >= {old.prefix, new.key.prefix}
    assert kinds() == ["key.created", "key.rotated"]


def test_a_key_that_ends_before_the_grace_keeps_its_end() -> None:
    old = new_key(expires_at=LATER).key
    key_rotate(prefix=old.prefix, actor="ann", now=NOW)
    old.refresh_from_db()
    assert old.expires_at == LATER


def test_what_is_revoked_stays_revoked() -> None:
    key = new_key().key
    key_revoke(prefix=key.prefix, actor="ann", now=NOW, why="leaked")
    for ask in (key_revoke, key_rotate, key_change):
        with pytest.raises(Conflict, match=r"was revoked at 2026-11-21 12:00 UTC"):
            ask(prefix=key.prefix, actor="ann", now=NOW)
    assert "revoked: leaked, requested by ann" in Event.objects.get(kind="key.revoked").message


def test_a_revocation_is_confirmed_once_the_last_ingress_enforces_it() -> None:
    rows.deployment()
    east, west = ingress("us-east-1"), ingress("us-west-2")
    key = new_key().key
    publish()
    for gate in (east, west):
        acknowledge(gate, 1)
    key_revoke(prefix=key.prefix, actor="ann", now=NOW)
    assert revocations_confirm(now=NOW) == []
    publish()
    acknowledge(east, 2)
    assert revocations_confirm(now=NOW + timedelta(seconds=1)) == []
    acknowledge(west, 2)
    assert revocations_confirm(now=NOW + timedelta(seconds=1.5)) == [key.prefix]
    key.refresh_from_db()
    assert key.revocation_lag_s == 1.5
    event = Event.objects.get(kind="key.refused")
    assert "1.5 s after its revocation" in event.message
    assert revocations_confirm(now=LATER) == []


def test_an_ingress_that_said_nothing_yet_may_be_serving_and_is_waited_for() -> None:
    gate = ingress()
    key = new_key().key
    key_revoke(prefix=key.prefix, actor="ann", now=NOW)
    publish()
    assert revocations_confirm(now=NOW) == []
    acknowledge(gate, 0)
    assert revocations_confirm(now=NOW) == []
    acknowledge(gate, 1)
    assert revocations_confirm(now=NOW) == [key.prefix]


def test_without_any_ingress_nothing_is_waited_for() -> None:
    key = new_key().key
    key_revoke(prefix=key.prefix, actor="ann", now=NOW)
    assert revocations_confirm(now=NOW) == [key.prefix]


def test_a_key_long_expired_is_no_longer_published() -> None:
    old, lasting = new_key(expires_at=LATER).key, new_key().key
    assert keys_retire(now=LATER + EXPIRED_KEPT_FOR) == []
    assert keys_retire(now=LATER + EXPIRED_KEPT_FOR + timedelta(seconds=1)) == [old.prefix]
    assert {key.prefix for key in keys_for_ingresses()} & {old.prefix, lasting.prefix} == {lasting.prefix}
