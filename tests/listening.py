import asyncio

TURNS_TO_BEGIN = 5
"""Of the event loop, until an accepted connection has its conversation: transport, protocol, task."""


async def stop_listening(*servers: asyncio.Server) -> None:
    """Closes servers after their accepted connections have started: asyncio loses a connection that was accepted in the
    turn in which its server is closed."""
    loop = asyncio.get_running_loop()
    for server in servers:
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
    for _ in range(TURNS_TO_BEGIN):
        await asyncio.sleep(0)
    for server in servers:
        server.close()
