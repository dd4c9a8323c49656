"""Usage by tenant: what each one uses of this cell. Their number is bounded, whatever arrives; it forgets a tenant
only when another needs the place, and never one with requests in flight."""

from dataclasses import dataclass
from time import time

from engine_agent.protocol.messages import MAX_TENANTS_REPORTED, OTHER_TENANTS, TenantLoad

FORGET_AFTER_S = 60.0
"""A tenant that sent nothing for this long has been reported many times over."""


@dataclass(slots=True)
class TenantUse:
    """One tenant. `since` and `used_at` in seconds since 1970."""

    since: float
    used_at: float
    in_flight: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def load(self) -> TenantLoad:
        return TenantLoad(
            since=round(self.since, 3),
            in_flight=self.in_flight,
            requests_total=self.requests,
            prompt_tokens_total=self.prompt_tokens,
            completion_tokens_total=self.completion_tokens,
        )


class Tenants:
    """At most `limit` tenants by name, in the order of their last use; the rest share one row."""

    def __init__(self, limit: int = MAX_TENANTS_REPORTED) -> None:
        self._limit = limit
        self._uses: dict[str, TenantUse] = {}

    def of(self, tenant: str, now: float | None = None) -> TenantUse | None:
        """The row that a new request of this tenant is counted in; None where no tenant is named."""
        if not tenant:
            return None
        at = time() if now is None else now
        use = self._uses.pop(tenant, None)
        if use is None and tenant != OTHER_TENANTS and not self._has_place(at):
            return self.of(OTHER_TENANTS, at)
        use = use or TenantUse(since=at, used_at=at)
        use.used_at = at
        self._uses[tenant] = use
        return use

    def loads(self) -> dict[str, TenantLoad]:
        """As the protocol carries them."""
        return {tenant: use.load() for tenant, use in self._uses.items()}

    def _has_place(self, now: float) -> bool:
        named = len(self._uses) - (OTHER_TENANTS in self._uses)
        if named < self._limit:
            return True
        for tenant, use in self._uses.items():
            if now - use.used_at < FORGET_AFTER_S:
                return False  # the others were used later still
            if not use.in_flight and tenant != OTHER_TENANTS:
                del self._uses[tenant]
                return True
        return False
