"""Browsers' WebSocket: forwards hints ("cells, this one") and never any content.

The browser then fetches what it may see, so permissions live in the pages alone.
"""

import json
from typing import Any

from channels.generic.websocket import AsyncWebsocketConsumer

from kernel.live import BROWSERS


class LiveConsumer(AsyncWebsocketConsumer):  # type: ignore[misc] # channels has no types
    """One browser tab. Only signed-in people connect; what a tab sends is ignored."""

    async def connect(self) -> None:
        if not self.scope["user"].is_authenticated:
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
