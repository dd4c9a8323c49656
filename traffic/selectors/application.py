"""Who an application is, by the key that it shows: the same keys that ingresses know, looked up where they are kept."""

from dataclasses import dataclass
from datetime import datetime

from engine_agent.protocol.states import ServingClass
from kernel.secrets import secret_matches, secret_prefix
from traffic.models import ApplicationKey, Budget
from traffic.planning.key import KeyState
from traffic.selectors.key import key_standing


@dataclass(frozen=True, slots=True)
class Application:
    """Nobody in particular has no tenant and no key. No deployments: all of them; a limit of 0 is none. `over_quota`:
    the tenant's budget is used up."""

    tenant: str = ""
    key: str = ""
    serving_class: ServingClass = ServingClass.REALTIME
    deployments: tuple[str, ...] = ()
    requests_per_min: int = 0
    max_concurrent: int = 0
    over_quota: bool = False

    def may_use(self, deployments: frozenset[str]) -> bool:
        """Whether its key opens one of these."""
        return not self.deployments or not deployments.isdisjoint(self.deployments)


UNKNOWN = "this API key is unknown, or was revoked"


class UnknownApplication(Exception):
    """No key, where one is required, or one that opens nothing. `code` as ingresses say it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def application_of(authorization: str, now: datetime) -> Application:
    """The application that shows this Authorization header.

    Raises:
        UnknownApplication: see there.
    """
    scheme, _, text = authorization.partition(" ")
    text = text.strip() if scheme.casefold() == "bearer" else ""
    if not text.startswith("sw_"):
        if key_standing().required:
            raise UnknownApplication("missing_api_key", "no API key: send it as `Authorization: Bearer sw_...`")
        return Application()
    key = ApplicationKey.objects.filter(prefix=secret_prefix(text) or "").first()
    if key is None or not secret_matches(text, key.digest):
        raise UnknownApplication("invalid_api_key", UNKNOWN)
    return application_with(key, now)


def application_with(key: ApplicationKey, now: datetime) -> Application:
    """The application that a key is of.

    Raises:
        UnknownApplication: it opens nothing any more.
    """
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
        over_quota=Budget.objects.filter(tenant=key.tenant, stopped=True).exists(),
    )
