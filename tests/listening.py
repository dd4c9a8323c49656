import asyncio

TURNS_TO_BEGIN = 5
"""Of the event loop, until an accepted connection has its conversation: transport, protocol, task."""


async def stop_listening(*servers: asyncio.Server) -> None:
    """Close servers once what they have accepted has begun: asyncio drops a connection that was accepted in the same
    turn in which its server is closed, and nobody could close it any more."""
    loop = asyncio.get_running_loop()
    for server in servers:
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
    for _ in range(TURNS_TO_BEGIN):
        await asyncio.sleep(0)
    for server in servers:
        server.close()
