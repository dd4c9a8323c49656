"""Application keys as their pages show them: who may ask, what was asked, and whether every ingress follows."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet

from kernel.tones import Tone
from traffic.models import ApplicationKey, Ingress, KeyPolicy, UsageHour
from traffic.planning.key import KEY_TONE, KeyState, requiring_effect, revoking_effect
from traffic.selectors.key import ingresses_waited_for, ingresses_with_keys, keys_described, keys_in_state

KEYS_SHOWN = 100
HOURS_SHOWN = 48


@dataclass(frozen=True, slots=True)
class KeyRow:
    key: ApplicationKey
    state: KeyState

    @property
    def tone(self) -> Tone:
        return KEY_TONE[self.state]

    @property
    def limits(self) -> str:
        """In words; "none" where there is none."""
        return limits_words(self.key)


@dataclass(frozen=True, slots=True)
class KeyList:
    rows: tuple[KeyRow, ...]
    more: bool
    filtered: bool


@dataclass(frozen=True, slots=True)
class KeyDetail:
    """`waits_for`: ingresses that still take a revoked key; `effect` of revoking it."""

    row: KeyRow
    waits_for: tuple[str, ...]
    effect: str


@dataclass(frozen=True, slots=True)
class Gate:
    """An ingress and the version of the keys that it enforces."""

    ingress: Ingress
    version: int
    wanted: int

    @property
    def follows(self) -> bool:
        return self.version >= self.wanted


@dataclass(frozen=True, slots=True)
class PolicyView:
    """Whether keys are required, what the other position would do, who follows, and how long revocations took."""

    required: bool
    effect: str
    gates: tuple[Gate, ...]
    last_lag_s: float | None
    worst_lag_s: float | None
    revocations: int


def key_list(*, state: str, tenant: str, text: str, now: datetime) -> KeyList:
    keys = keys_described(now).order_by("-id")
    if state in set(KeyState):
        keys = keys_in_state(keys, KeyState(state), now)
    if tenant:
        keys = keys.filter(tenant=tenant)
    if text:
        keys = keys.filter(Q(name__icontains=text) | Q(tenant__icontains=text) | Q(prefix=text.removeprefix("sw_")))
    found = list(keys[: KEYS_SHOWN + 1])
    rows = tuple(KeyRow(key, key.state_at(now)) for key in found[:KEYS_SHOWN])
    return KeyList(rows, more=len(found) > KEYS_SHOWN, filtered=bool(state or tenant or text))


def key_tenants() -> Iterable[str]:
    return ApplicationKey.objects.order_by("tenant").values_list("tenant", flat=True).distinct()


def key_find(prefix: str, now: datetime) -> KeyDetail | None:
    key: Any = keys_described(now).filter(prefix=prefix).first()
    if key is None:
        return None
    waits = key.revoked_version is not None and key.refused_everywhere_at is None
    return KeyDetail(
        row=KeyRow(key, key.state_at(now)),
        waits_for=ingresses_waited_for(key.revoked_version or 0) if waits else (),
        effect=revoking_effect(
            ingresses=ingresses_with_keys().count(), requests_24h=key.requests_24h, last_used_at=key.last_used_at
        ),
    )


def usage_rows(*, key: str = "", tenant: str = "") -> tuple[UsageHour, ...]:
    """The newest hours of a key, or of a tenant as cells count it."""
    hours = UsageHour.objects.filter(key=key) if key else UsageHour.objects.filter(tenant=tenant, key="")
    return tuple(hours.order_by("-hour")[:HOURS_SHOWN])


def policy_view(now: datetime) -> PolicyView:
    policy = KeyPolicy.objects.first()
    required = policy.required if policy else False
    active = keys_in_state(ApplicationKey.objects.all(), KeyState.ACTIVE, now).count()
    gates: QuerySet[Any] = ingresses_with_keys().order_by("region_id", "id")
    confirmed = ApplicationKey.objects.filter(refused_everywhere_at__isnull=False).order_by("-refused_everywhere_at")
    lags = [key.revocation_lag_s or 0.0 for key in confirmed[:100]]
    return PolicyView(
        required=required,
        effect=requiring_effect(required=required, active_keys=active),
        gates=tuple(Gate(gate, gate.version, gate.wanted_version) for gate in gates),
        last_lag_s=lags[0] if lags else None,
        worst_lag_s=max(lags) if lags else None,
        revocations=len(lags),
    )


def limits_words(key: ApplicationKey) -> str:
    words = (
        (key.requests_per_min, "requests/min"),
        (key.tokens_per_min, "tokens/min"),
        (key.max_concurrent, "at once"),
    )
    return ", ".join(f"{limit:,} {what}" for limit, what in words if limit) or "none"
