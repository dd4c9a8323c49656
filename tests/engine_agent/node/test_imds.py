"""Notices in the metadata of a machine, from a substitute service: only with tokens, mostly 404."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine_agent.node.imds import (
    BODY_MOST,
    MAINTENANCE,
    SPOT,
    VENDOR_FILE,
    Metadata,
    MetadataUnavailable,
    NoticeWatch,
    metadata_here,
    notices_of,
)
from engine_agent.protocol.machine_messages import MachineNotice
from engine_agent.protocol.states import MachineNoticeKind

ACTION = b'{"action": "terminate", "time": "2026-11-24T03:02:10Z"}'
ENDS_AT = 1795489330.0


def event(code: str, state: str = "active", at: str = "21 Jan 2027 09:00:43 GMT") -> dict[str, str]:
    return {"NotBefore": at, "Code": code, "Description": "d", "EventId": "instance-event-1", "State": state}


def maintenance(*events: dict[str, str]) -> bytes:
    return json.dumps(events).encode()


def test_each_document_has_its_meaning_and_none_means_nothing() -> None:
    assert notices_of(b"", b"", b"") == notices_of(b"", b"", b"[]") == ()
    found = notices_of(ACTION, b'{"noticeTime": "2026-11-24T03:00:10Z"}', maintenance(event("instance-retirement")))
    assert [notice.kind for notice in found] == ["interruption", "retirement", "rebalance"]
    assert found[0].ends_at == ENDS_AT


def test_of_several_events_the_first_counts_and_those_that_are_over_do_not() -> None:
    later = event("system-reboot", at="22 Jan 2027 09:00:43 GMT")
    done = event("system-reboot", "completed", "20 Jan 2027 09:00:43 GMT")
    called_off = event("instance-stop", "canceled")
    only = notices_of(b"", b"", maintenance(later, event("system-reboot"), done, called_off))
    assert only == (MachineNotice(MachineNoticeKind.MAINTENANCE, 1800522043.0),)


@pytest.mark.parametrize(
    ("spot", "events"),
    [(b"soon", b""), (b"{}", b""), (b'{"action":"stop","time":"soon"}', b""), (b"", b"{}"), (b"", b'[{"Code":"x"}]')],
)
def test_what_makes_no_sense_is_not_known_instead_of_nothing(spot: bytes, events: bytes) -> None:
    with pytest.raises(MetadataUnavailable, match="invalid document"):
        notices_of(spot, b"", events)


class Service(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.said: dict[str, bytes] = {}
        self.tokens = 0
        self.status = 404

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.server_address[1]


class Answers(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        assert isinstance(self.server, Service)
        self.server.tokens += 1
        self._answer(200, f"token-{self.server.tokens}".encode())

    def do_GET(self) -> None:
        assert isinstance(self.server, Service)
        if self.headers["X-aws-ec2-metadata-token"] != f"token-{self.server.tokens}":
            self._answer(401, b"")
            return
        body = self.server.said.get(self.path.removeprefix("/latest/meta-data/"))
        self._answer(self.server.status if body is None else 200, body or b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    thread = threading.Thread(target=server.serve_forever, args=[0.05], daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_nothing_there_is_the_usual_answer_and_one_token_serves_many_questions(service: Service) -> None:
    metadata = Metadata(service.address)
    assert metadata.notices(0.0) == metadata.notices(5.0) == ()
    assert service.tokens == 1
    service.said[SPOT] = ACTION
    assert metadata.notices(10.0) == (MachineNotice(MachineNoticeKind.INTERRUPTION, ENDS_AT),)
    metadata.notices(4000.0)
    assert service.tokens == 2


def test_a_token_that_counts_no_more_is_replaced(service: Service) -> None:
    metadata = Metadata(service.address)
    metadata.notices(0.0)
    service.tokens = 7
    assert metadata.notices(5.0) == ()
    assert service.tokens == 8


def test_refused_too_long_and_silent_services_are_not_known(service: Service) -> None:
    service.status = 503
    with pytest.raises(MetadataUnavailable, match="answers 503"):
        Metadata(service.address).notices(0.0)
    service.said[SPOT] = service.said[MAINTENANCE] = b"x" * (BODY_MOST + 1)
    with pytest.raises(MetadataUnavailable, match="more than"):
        Metadata(service.address).notices(0.0)
    service.server_close()
    with pytest.raises(MetadataUnavailable, match="does not answer"):
        Metadata(("127.0.0.1", 1)).notices(0.0)


@pytest.mark.asyncio
async def test_a_change_is_told_and_trouble_is_neither_a_notice_nor_their_end(service: Service) -> None:
    told = []
    watch = NoticeWatch(lambda: told.append(watch.notices), Metadata(service.address))
    for said in ({}, {}, {SPOT: ACTION}):
        service.said = dict(said)
        await watch.poll()
    service.status = 500
    service.said = {}
    await watch.poll()
    assert told == [(), (MachineNotice(MachineNoticeKind.INTERRUPTION, ENDS_AT),), None]


def test_only_instances_have_metadata(tmp_path: Path) -> None:
    assert metadata_here({}, tmp_path) is None
    assert metadata_here({"SWITCHYARD_CLOUD": "aws"}, tmp_path) is not None
    vendor = tmp_path / VENDOR_FILE
    vendor.parent.mkdir(parents=True)
    for text, is_instance in (("QEMU\n", False), ("Amazon EC2\n", True)):
        vendor.write_text(text)
        assert (metadata_here({}, tmp_path) is not None) is is_instance
