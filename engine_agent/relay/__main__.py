"""`python -m engine_agent.relay`: runs one relay of an ingress until SIGTERM or SIGINT. It has no port: HAProxy reaches
it by a socket that is a file, and it reaches HAProxy by another."""

import argparse
import gc
import os
import sys
from pathlib import Path
from typing import Final

import uvloop

from engine_agent.protocol.log_lines import configure_logging
from engine_agent.relay.server import RelayServer

HAPROXY_SOCKET: Final = "attempts.sock"
"""Where HAProxy takes attempts, in the folder of the relays."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_agent.relay", description=__doc__)
    parser.add_argument("--socket", required=True, type=Path, help="where HAProxy reaches it")
    parser.add_argument("--release", required=True, help="of the agent; marks the process")
    parser.add_argument("--max-body-bytes", required=True, type=int)
    options = parser.parse_args(arguments)
    os.umask(0o077)
    configure_logging(os.environ, "switchyard-relay")
    os.chdir(options.socket.parent)  # names of sockets may have 108 bytes only
    gc.freeze()
    uvloop.run(RelayServer(Path(options.socket.name), Path(HAPROXY_SOCKET), options.max_body_bytes).run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
