"""`python -m engine_agent.grpc_gateway`: runs the gRPC gateway of one ingress until SIGTERM or SIGINT. It has no port:
HAProxy terminates TLS and HTTP/2 and reaches it by a socket that is a file."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Final

import grpc.aio
import uvloop

from engine_agent.grpc_gateway.ingress_client import IngressClient
from engine_agent.grpc_gateway.service import handlers
from engine_agent.protocol.log_lines import configure_logging

log = logging.getLogger(__name__)

GATEWAY_SOCKET: Final = "gateway.sock"
"""Where the gateway accepts calls from HAProxy."""
INGRESS_SOCKET: Final = "requests.sock"
"""Where HAProxy takes the gateway's requests."""
ROOM_BYTES: Final = 64 * 1024
"""Room in a message for its tensors, next to the longest text."""
STOP_GRACE_S: Final = 20.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_agent.grpc_gateway", description=__doc__)
    parser.add_argument("--folder", required=True, type=Path, help="of both sockets")
    parser.add_argument("--release", required=True, help="of the agent; marks the process")
    parser.add_argument("--max-body-bytes", required=True, type=int)
    parser.add_argument("--max-calls", required=True, type=int)
    options = parser.parse_args(arguments)
    os.umask(0o077)
    configure_logging(os.environ, "switchyard-grpc-gateway")
    os.chdir(options.folder)  # names of sockets may have 108 bytes only
    uvloop.run(serve(Path(), options.max_body_bytes, options.max_calls))
    return 0


async def serve(folder: Path, max_body_bytes: int, max_calls: int) -> None:
    """Serves until a signal. The socket gets its name when it accepts calls: a later gateway takes the name over while
    this one finishes its calls."""
    server = grpc.aio.server(
        handlers=handlers(IngressClient(folder / INGRESS_SOCKET)),
        options=(
            ("grpc.max_receive_message_length", max_body_bytes + ROOM_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", max_calls),
            ("grpc.max_metadata_size", 16 * 1024),
        ),
        maximum_concurrent_rpcs=max_calls,
    )
    own = folder / f"{GATEWAY_SOCKET}.{os.getpid()}"
    own.unlink(missing_ok=True)
    server.add_insecure_port(f"unix:{own}")
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await server.start()
    own.rename(folder / GATEWAY_SOCKET)
    log.info("serves gRPC, at most %d calls", max_calls)
    await stopping.wait()
    with contextlib.suppress(asyncio.CancelledError):
        await server.stop(STOP_GRACE_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
