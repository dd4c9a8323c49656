"""An attacker between a follower and its leader, who reads all traffic and may present another certificate."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from engine_agent.engines.handshake import follower_context, leader_certificate
from engine_agent.node.identity import throwaway_certificate


class Between:
    """Relays one connection after the other to the leader; `seen` is all plaintext that passed."""

    def __init__(self, leader_port: int, *, with_a_certificate: bool) -> None:
        self._leader_port = leader_port
        self._context = leader_certificate(throwaway_certificate()).context if with_a_certificate else None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.seen = bytearray()
        Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                try:
                    self._join(caller, socket.create_connection(("127.0.0.1", self._leader_port)))
                except OSError:
                    caller.close()

    def _join(self, caller: socket.socket, leader: socket.socket) -> None:
        if self._context is not None:
            caller = self._context.wrap_socket(caller, server_side=True)
            leader = follower_context().wrap_socket(leader)
            # The two sides alternate, so one thread suffices and no ssl.SSLSocket is used by two.
            Thread(target=self._take_turns, args=(leader, caller), daemon=True).start()
            return
        Thread(target=self._pass_both_ways, args=(caller, leader), daemon=True).start()

    def _take_turns(self, speaker: socket.socket, listener: socket.socket) -> None:
        with contextlib.suppress(OSError), speaker, listener:
            while passed := speaker.recv(65536):
                self.seen += passed
                listener.sendall(passed)
                speaker, listener = listener, speaker

    def _pass_both_ways(self, caller: socket.socket, leader: socket.socket) -> None:
        with caller, leader:
            back = Thread(target=self._pass_on, args=(leader, caller), daemon=True)
            back.start()
            self._pass_on(caller, leader)
            back.join()

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while passed := here.recv(65536):
                self.seen += passed
                there.sendall(passed)
        with contextlib.suppress(OSError):
            there.shutdown(socket.SHUT_WR)


@contextmanager
def between(leader_port: int, *, with_a_certificate: bool) -> Iterator[Between]:
    """Runs the attacker until the block ends."""
    stranger = Between(leader_port, with_a_certificate=with_a_certificate)
    try:
        yield stranger
    finally:
        stranger.close()


def old_tls() -> ssl.SSLContext:
    """A client of TLS 1.2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context
