"""Names that applications ask for, of deployments, models and adapters: whether a new one is taken. Pure.

Every region's ingress lists every deployment, so a name is one for the whole fleet. A model's name may lead to several
deployments (docs/design/ingress.md#splits); an adapter's leads to one, and is no model's.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedName:
    """A name, of which deployment, and what it is there. `adapter_of`: the version (`model@version`) whose adapter it
    is; empty: it is the deployment's own name, or its model's."""

    name: str
    deployment: str
    adapter_of: str = ""

    def __str__(self) -> str:
        if self.adapter_of:
            return f"adapter {self.name} of {self.adapter_of}, deployment {self.deployment}"
        if self.name == self.deployment:
            return f"deployment {self.name}"
        return f"model {self.name} of deployment {self.deployment}"


def name_collision(wanted: Iterable[ServedName], served: Iterable[ServedName]) -> str:
    """Why these names cannot be served beside those that are, naming both; empty if they can. Versions of one
    deployment may have an adapter in common: during a rollout both are served."""
    there = list(served)
    for new in wanted:
        for old in there:
            same_deployment = new.deployment == old.deployment
            both_adapters = bool(new.adapter_of and old.adapter_of)
            may_share = same_deployment if both_adapters else not (new.adapter_of or old.adapter_of)
            if new.name == old.name and not may_share:
                return (
                    f"{new} would have the name of {old}; each name that applications ask for leads to one: rename it"
                )
    return ""
