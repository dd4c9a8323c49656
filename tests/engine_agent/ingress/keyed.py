"""Application keys for tests: their text for clients, and their entry in a routing table."""

import hashlib
from dataclasses import dataclass
from typing import Any

from engine_agent.protocol.ingress_messages import ApiKey


@dataclass(frozen=True)
class Keyed:
    text: str
    entry: ApiKey

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.text}"}


def keyed(prefix: str = "0a1b2c3d", tenant: str = "rufus", serving_class: str = "realtime", **limits: Any) -> Keyed:
    text = f"sw_{prefix}_{'5' * 48}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Keyed(text, ApiKey(prefix, digest, tenant, serving_class, **limits))
