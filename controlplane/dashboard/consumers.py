"""Browsers' WebSocket: forwards hints ("cells, this one") and never any content.

The browser then fetches what it may see, so permissions live in the pages alone.
"""

import json
from collections import Counter
from typing import Any

from channels.generic.websocket import AsyncWebsocketConsumer

from kernel.live import BROWSERS

MOST_OF_USER = 50
"""Sockets of one user in this process; a browser opens one for each tab."""
OPEN: Counter[Any] = Counter()
"""User -> sockets that are open."""


class LiveConsumer(AsyncWebsocketConsumer):  # type: ignore[misc] # channels has no types
    """One browser tab. Only signed-in people connect; what a tab sends is ignored."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Count it from here to its end, however it ends."""
        user = scope["user"].pk
        OPEN[user] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            OPEN[user] -= 1
            if not OPEN[user]:
                del OPEN[user]

    async def connect(self) -> None:
        user = self.scope["user"]
        if not user.is_authenticated or OPEN[user.pk] > MOST_OF_USER:
            await self.close()
            return
        await self.channel_layer.group_add(BROWSERS, self.channel_name)
        await self.accept()

    async def disconnect(self, code: int) -> None:
        await self.channel_layer.group_discard(BROWSERS, self.channel_name)

    async def live_hint(self, message: dict[str, Any]) -> None:
        """Handler of `live.hint` (kernel.live)."""
        await self.send(text_data=json.dumps({"topic": message["topic"], "key": message["key"]}))

    async def live_goodbye(self, message: dict[str, Any]) -> None:
        """Handler of `live.goodbye`: the session has ended, if it is this one."""
        if self.scope["session"].session_key == message["session"]:
            await self.close()
