"""Runs the embedded servers alone, for tests and for work on the code: their URLs on one line, until told to stop."""

import asyncio
import json
import os
import signal
import sys

from controlplane.embedded.configuration import Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.home import Home
from controlplane.embedded.servers import choose_servers
from controlplane.embedded.sockets import remove_socket_folder, socket_folder
from controlplane.embedded.supervisor import Supervisor


async def run_servers(configuration: Configuration, home: Home, *, durable: bool) -> int:
    """Start the servers, print `{"database_url": …, "redis_url": …}`, and stop on SIGINT or SIGTERM.

    Raises:
        CannotStart: they do not start.
    """
    stop_asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop_asked.set)
    console = Console(sys.stderr)
    servers = choose_servers(configuration, home, durable=durable)
    supervisor = Supervisor(home, console, on_change=lambda _: None)
    try:
        await servers.initialise(os.environ, console)
        for service in servers.services(os.environ):
            await supervisor.start(service)
        await servers.wait_until_ready()
        Console().plain(json.dumps({"database_url": servers.database_url, "redis_url": servers.redis_url}))
        await stop_asked.wait()
    finally:
        await supervisor.stop_all()
        remove_socket_folder(socket_folder(home.path))
    return 0
