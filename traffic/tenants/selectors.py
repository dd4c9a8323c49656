"""Identifies applications by their key, with the keys that ingresses have, and checks hosts and S3 prefixes against a
tenant's grants. There is no grant by default (I15)."""

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q

from engine_agent.protocol.states import ServingClass
from kernel.outbound import host_of, parse_url
from kernel.secrets import secret_matches, secret_prefix
from traffic.keys.models import ApplicationKey
from traffic.keys.planner import KeyState
from traffic.keys.selectors import key_ring_version
from traffic.tenants.models import GrantUse, TenantGrant
from traffic.tenants.planner import ApplicationRefused, ObjectUri
from traffic.usage.models import Budget


@dataclass(frozen=True, slots=True)
class Application:
    """An application without a key has an empty tenant and key. No deployments means all; a limit of 0 means none.
    `over_quota`: the tenant's or the key's budget is used up."""

    tenant: str = ""
    key: str = ""
    serving_class: ServingClass = ServingClass.REALTIME
    deployments: tuple[str, ...] = ()
    requests_per_min: int = 0
    max_concurrent: int = 0
    over_quota: bool = False

    def may_use(self, deployments: frozenset[str]) -> bool:
        """Whether its key is valid for any of these."""
        return not self.deployments or not deployments.isdisjoint(self.deployments)


UNKNOWN = "this API key is unknown, or was revoked"


class UnknownApplication(ApplicationRefused):
    """No key although one is required, or an invalid one. `code` is the same as at ingresses."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(401, code, message)


def application_of(authorization: str, now: datetime) -> Application:
    """Returns the application of this Authorization header. Raises UnknownApplication if the key is missing or
    invalid."""
    scheme, _, text = authorization.partition(" ")
    text = text.strip() if scheme.casefold() == "bearer" else ""
    if not text.startswith("sw_"):
        if key_ring_version().required:
            raise UnknownApplication("missing_api_key", "no API key: send it as `Authorization: Bearer sw_...`")
        return Application()
    key = ApplicationKey.objects.filter(prefix=secret_prefix(text) or "").first()
    if key is None or not secret_matches(text, key.digest):
        raise UnknownApplication("invalid_api_key", UNKNOWN)
    return application_with(key, now)


def application_with(key: ApplicationKey, now: datetime) -> Application:
    """Returns the application of a key. Raises UnknownApplication if the key is no longer valid."""
    match key.state_at(now):
        case KeyState.REVOKED:
            raise UnknownApplication("invalid_api_key", UNKNOWN)
        case KeyState.EXPIRED:
            raise UnknownApplication("expired_api_key", "this API key has expired; ask for another one")
    return Application(
        tenant=key.tenant,
        key=key.prefix,
        serving_class=ServingClass(key.serving_class),
        deployments=tuple(key.deployments),
        requests_per_min=key.requests_per_min,
        max_concurrent=key.max_concurrent,
        over_quota=Budget.objects.filter(Q(tenant=key.tenant) | Q(key=key.budget_key), stopped=True).exists(),
    )


def callback_refusal(tenant: str, url: str) -> str:
    """Returns why callbacks of this tenant may not call a URL, or an empty text. Raises RefusedUrl if the URL is
    malformed."""
    host = host_of(parse_url(url))
    if TenantGrant.objects.filter(tenant=tenant, use=GrantUse.CALLBACK.value, target=host).exists():
        return ""
    whose = f"tenant {tenant}" if tenant else "requests without a key"
    return f"callbacks of {whose} have no grant for {host[:200]}; an admin can add it"


def place_grant_for(tenant: str, wanted: ObjectUri, use: GrantUse) -> TenantGrant | None:
    grants = TenantGrant.objects.filter(tenant=tenant, use=use.value).order_by("id")
    return next((grant for grant in grants if grant.place.covers(wanted)), None)


def place_refusal(tenant: str, wanted: ObjectUri, use: GrantUse) -> str:
    """Returns why batches of this tenant may not use an address, or an empty text."""
    if place_grant_for(tenant, wanted, use) is not None:
        return ""
    whose = f"tenant {tenant}" if tenant else "requests without a key"
    return f"batches of {whose} have no grant to {use} {wanted}; an admin can add one"


def s3_grant_check(tenant: str, wanted: ObjectUri, use: GrantUse, member: str) -> None:
    """Raises ApplicationRefused if batches of this tenant may not use it."""
    if refusal := place_refusal(tenant, wanted, use):
        raise ApplicationRefused(403, "place_not_allowed", refusal, f"switchyard.{member}")
