"""Runs one member of a cell: `python -m engine_agent.engines.sim --node-id … --role leader|follower …`."""

import asyncio
import logging
import sys

import uvloop

from engine_agent.engines.openai_http import PortTaken
from engine_agent.engines.sim.member import Follower, Leader
from engine_agent.engines.sim.settings import Settings, parse_settings
from engine_agent.protocol.log_lines import PlainLines
from engine_agent.protocol.states import MemberRole

log = logging.getLogger("sim")


async def _live(settings: Settings) -> int:
    try:
        member = Leader(settings) if settings.role is MemberRole.LEADER else Follower(settings)
        return await member.run()
    except PortTaken as error:
        log.error("cannot start: %s", error)
        return 1


def main() -> int:
    settings = parse_settings(sys.argv[1:])
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(PlainLines(f"%(asctime)s {settings.node_id} %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_live(settings))


if __name__ == "__main__":
    sys.exit(main())
