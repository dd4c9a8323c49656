"""The response to `GET /status` on the proxy's administration port: the proxy writes it, the agent of its node reads
it."""

import msgspec

from engine_agent.protocol.messages import Health, Load
from engine_agent.protocol.states import Phase


class ProxyStatus(msgspec.Struct, frozen=True):
    """How a cell is, as its proxy sees it. `in_flight`: requests that were admitted and have not ended. `state`: what
    to hold the next question against (`engine_agent.protocol.local_servers`). `pairs`: the name of those that it has
    (`engine_agent.protocol.proxy_messages`)."""

    health: Health
    load: Load
    phase: Phase
    in_flight: int = 0
    state: str = ""
    pairs: str = ""
