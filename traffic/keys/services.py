"""Creates, changes, rotates and revokes application keys, each with its event, and publishes them to ingresses
immediately. Every change locks the single `KeyPolicy` row, so versions are sequential. The text of a key is returned
once and never stored."""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction

from engine_agent.protocol.request_messages import RequestWindow
from engine_agent.protocol.states import ServingClass
from fleet.deployments.models import Deployment
from fleet.requests.services import ingress_windows_store
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.secrets import secret_row_create
from kernel.tones import Tone
from traffic.async_requests.models import RequestQueue
from traffic.keys.models import ApplicationKey, KeyPolicy
from traffic.keys.planner import LIMITS, KeyState, RevokedKey, plan_refused
from traffic.keys.selectors import keys_in_force

PUBLISH_TASK = "traffic.publish"
ROTATION_GRACE = timedelta(hours=24)
"""A rotated key stays valid this long, so that the application can switch."""


EXPIRED_KEPT_FOR = timedelta(days=30)
"""Expired keys are refused as expired for this time and as unknown afterwards, which keeps tables short."""
RETIRED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key with its text, which cannot be read again."""

    key: ApplicationKey
    text: str


@transaction.atomic
def key_create(
    *,
    name: str,
    tenant: str,
    actor: str,
    now: datetime,
    deployments: Iterable[str] = (),
    serving_class: ServingClass = ServingClass.REALTIME,
    expires_at: datetime | None = None,
    allowed_origins: Iterable[str] = (),
    **limits: int,
) -> NewKey:
    """Creates a key for a tenant. Raises InvalidInput for an unknown deployment, or an expiry in the past."""
    policy = _lock_policy()
    scope = _checked_scope(deployments)
    _check_expiry(expires_at, now)
    new = _issue_key(
        name=name, tenant=tenant, deployments=scope, serving_class=serving_class.value, expires_at=expires_at,
        allowed_origins=list(allowed_origins), created_by=actor, created_at=now, **limits,
    )  # fmt: skip
    _publish_key_change(policy, new.key, "created", Tone.IDLE, actor, now)
    return new


@transaction.atomic
def key_change(*, prefix: str, actor: str, now: datetime, **columns: Any) -> ApplicationKey:
    """Changes limits, name, origins or expiry. Raises Conflict if the key is revoked. Raises InvalidInput for an expiry
    in the past."""
    policy = _lock_policy()
    key = _lock_unrevoked_key(prefix)
    _check_expiry(columns.get("expires_at"), now)
    changed = {column: value for column, value in columns.items() if getattr(key, column) != value}
    for column, value in changed.items():
        setattr(key, column, value)
    if changed:
        key.save(update_fields=list(changed))
        _publish_key_change(policy, key, f"changed ({', '.join(sorted(changed))})", Tone.IDLE, actor, now)
    return key


@transaction.atomic
def key_rotate(*, prefix: str, actor: str, now: datetime, grace: timedelta = ROTATION_GRACE) -> NewKey:
    """Creates a key with the same settings, which shares the old one's budget. The old key expires after `grace`, or at
    its expiry if that is sooner. Request queues use the new key immediately. Raises Conflict if the key is revoked or
    has expired."""
    policy = _lock_policy()
    old = _lock_unrevoked_key(prefix)
    if old.state_at(now) is KeyState.EXPIRED:
        raise Conflict(f"key sw_{prefix} has expired; create another one")
    copied = ("name", "tenant", "deployments", "serving_class", "expires_at", "allowed_origins", *LIMITS)
    columns = {column: getattr(old, column) for column in copied}
    new = _issue_key(created_by=actor, created_at=now, first_prefix=old.budget_key, **columns)
    ends_at = now + grace
    old.expires_at = min(ends_at, old.expires_at) if old.expires_at else ends_at
    old.save(update_fields=["expires_at"])
    RequestQueue.objects.filter(key=old).update(key=new.key)
    change = f"rotated: sw_{new.key.prefix} replaces it, and it expires at {old.expires_at:%Y-%m-%d %H:%M} UTC"
    _publish_key_change(policy, old, change, Tone.MOVING, actor, now)
    return new


@transaction.atomic
def key_revoke(*, prefix: str, actor: str, now: datetime, why: str = "") -> ApplicationKey:
    """Revokes a key. Each ingress refuses it once it has the next table. Raises Conflict if it is revoked already."""
    policy = _lock_policy()
    key = _lock_unrevoked_key(prefix)
    key.revoked_at, key.revoked_version = now, policy.version + 1
    key.save(update_fields=["revoked_at", "revoked_version"])
    _publish_key_change(policy, key, f"revoked{f': {why}' if why else ''}", Tone.WARN, actor, now)
    return key


@transaction.atomic
def keys_require(*, required: bool, actor: str, now: datetime, why: str = "") -> KeyPolicy:
    """Requires a key for every request, or no longer. Repeating it changes nothing."""
    policy = _lock_policy()
    if policy.required == required:
        return policy
    policy.required, policy.actor, policy.changed_at = required, actor, now
    _next_version(policy)
    change = "requests without a key are refused" if required else "requests without a key are served"
    event_record(
        kind="keys.required" if required else "keys.not_required",
        message=f"{change} now, requested by {actor}{f': {why}' if why else ''}",
        tone=Tone.MOVING,
        now=now,
        actor=actor,
    )
    return policy


def keys_retire(*, now: datetime) -> list[str]:
    """Revokes keys that expired long ago, so that ingresses no longer list them. Returns their prefixes."""
    ended = ApplicationKey.objects.filter(revoked_at=None, expires_at__lt=now - EXPIRED_KEPT_FOR)
    prefixes = list(ended.order_by("id").values_list("prefix", flat=True)[:RETIRED_AT_ONCE])
    for prefix in prefixes:
        key_revoke(prefix=prefix, actor="switchyard", now=now, why="expired long ago")
    return prefixes


def revocations_confirm(*, now: datetime) -> list[str]:
    """Records which revoked keys every ingress refuses. Returns their prefixes."""
    pending = ApplicationKey.objects.filter(revoked_at__isnull=False, refused_everywhere_at=None)
    revoked = [RevokedKey(prefix, version or 0) for prefix, version in pending.values_list("prefix", "revoked_version")]
    if not revoked:
        return []
    confirmed = plan_refused(revoked, keys_in_force())
    return [prefix for prefix in confirmed if _confirm_refused(prefix, now)]


@transaction.atomic
def key_ring_change() -> None:
    """Publishes the keys to every ingress again, after a change of other facts about them."""
    _next_version(_lock_policy())


def _confirm_refused(prefix: str, now: datetime) -> bool:
    with transaction.atomic():
        unconfirmed = ApplicationKey.objects.filter(prefix=prefix, refused_everywhere_at=None)
        if unconfirmed.update(refused_everywhere_at=now) == 0:
            return False
        key = ApplicationKey.objects.get(prefix=prefix)
        event_record(
            kind="key.refused",
            message=f"every ingress refuses key {key}, {key.revocation_lag_s:.1f} s after its revocation",
            tone=Tone.OK,
            now=now,
            detail={"key": prefix, "tenant": key.tenant, "lag_s": key.revocation_lag_s},
        )
        live.push("keys", prefix)
    return True


def _lock_policy() -> KeyPolicy:
    KeyPolicy.objects.get_or_create(pk=1)
    return KeyPolicy.objects.select_for_update().get(pk=1)


def _issue_key(**columns: Any) -> NewKey:
    return NewKey(*secret_row_create(ApplicationKey, **columns))


def _lock_unrevoked_key(prefix: str) -> ApplicationKey:
    key = ApplicationKey.objects.select_for_update().get(prefix=prefix)
    if key.revoked_at is not None:
        raise Conflict(f"key sw_{prefix} was revoked at {key.revoked_at:%Y-%m-%d %H:%M} UTC; create another one")
    return key


def _checked_scope(deployments: Iterable[str]) -> list[str]:
    wanted = sorted(set(deployments))
    known = set(Deployment.objects.values_list("name", flat=True))
    if unknown := [name for name in wanted if name not in known]:
        there = ", ".join(sorted(known)) or "none"
        message = f"there is no deployment {unknown[0]!r}; there are: {there}"
        raise InvalidInput(field="deployments", rule="exists", message=message)
    return wanted


def _check_expiry(expires_at: datetime | None, now: datetime) -> None:
    if expires_at is not None and expires_at <= now:
        raise InvalidInput(field="expires_at", rule="future", message="must be in the future")


def _publish_key_change(
    policy: KeyPolicy, key: ApplicationKey, what: str, tone: Tone, actor: str, now: datetime
) -> None:
    _next_version(policy)
    event_record(
        kind=f"key.{what.split(' ', maxsplit=1)[0].rstrip(':')}",
        message=f"key {key} of tenant {key.tenant} {what}, requested by {actor}",
        tone=tone,
        now=now,
        actor=actor,
        detail={
            "key": key.prefix,
            "tenant": key.tenant,
            "deployments": key.deployments,
            "serving_class": key.serving_class,
            "allowed_origins": key.allowed_origins,
            **{limit: getattr(key, limit) for limit in LIMITS},
        },
    )
    live.push("keys", key.prefix)


def _next_version(policy: KeyPolicy) -> None:
    policy.version += 1
    policy.change = uuid.uuid4().hex
    policy.save()
    live.push("keys")
    wake_ups.send(PUBLISH_TASK)


def refused_requests_store(*, windows: Sequence[tuple[str, str, RequestWindow]], now: datetime) -> int:
    """Stores windows of (ingress, region, window). The tenant of a key is the control plane's own. Returns the number
    of new rows."""
    prefixes = {sample.key for _, _, window in windows for sample in window.samples if sample.key}
    tenants = dict(ApplicationKey.objects.filter(prefix__in=prefixes).values_list("prefix", "tenant"))
    return ingress_windows_store(windows=windows, tenants=tenants, now=now)
