"""Requests that the proxy answers by itself: it collects the whole body, then asks a function for the reply. For small
bodies and quick functions only."""

from collections.abc import Callable

from engine_agent.proxy.downstream import ClientConnection
from engine_agent.proxy.refusal import Refusal
from engine_agent.proxy.wire import Reply, RequestHead, refusal_reply, reply_bytes

Answer = Callable[[RequestHead, bytes], Reply]


class LocalExchange:
    """One request with a local answer. Implements `Responder`."""

    def __init__(self, head: RequestHead, client: ClientConnection, answer: Answer) -> None:
        self._head = head
        self._client = client
        self._answer = answer
        self._body = b""

    def feed(self, data: bytes, *, complete: bool) -> None:
        self._body += data
        if complete:
            self._send(self._answer(self._head, self._body))

    def refuse(self, refusal: Refusal) -> None:
        self._send(refusal_reply(refusal))

    def client_gone(self) -> None:
        """Nothing runs for it."""

    def download_paused(self) -> None:
        """The reply is one write."""

    def download_resumed(self) -> None:
        """The reply is one write."""

    def _send(self, reply: Reply) -> None:
        keep_alive = self._client.may_keep_alive()
        wire = reply_bytes(reply, keep_alive=keep_alive)
        self._client.write(wire.removesuffix(reply.body) if self._head.method == b"HEAD" else wire)
        self._client.answered(keep_alive=keep_alive)
