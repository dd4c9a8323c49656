"""Applications reach an ingress over TLS, by the name that they request, while certificates change."""

import asyncio
import itertools
import json
import socket
import ssl
import stat
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio
from cryptography import x509
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from engine_agent.ingress.application_tls import ApplicationTlsState
from engine_agent.ingress.certificates import APPLICATION_FOLDER
from engine_agent.protocol.ingress_messages import ApplicationTls, ServerCertificate
from engine_agent.protocol.ports import tls_port
from engine_agent.protocol.states import PlainHttp
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, ask, pool, read_stream
from tests.server_certificates import PublicAuthority, Signed

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

BODY = b'{"model": "demo"}'
API = "api.example.test"
VERSIONS = itertools.count(1)


@pytest.fixture(scope="module")
def authority() -> PublicAuthority:
    return PublicAuthority()


def stated(authority: PublicAuthority, *servers: Signed, plain_http: PlainHttp = PlainHttp.SERVE) -> ApplicationTls:
    certificates = tuple(
        ServerCertificate(f"c-{number}", authority.chain(server) + server.key_pem)
        for number, server in enumerate(servers)
    )
    return ApplicationTls(str(next(VERSIONS)), certificates, plain_http.value)


def context_of(authority: PublicAuthority, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.root.pem)
    context.maximum_version = newest
    return context


def shown(ingress: RunningIngress, context: ssl.SSLContext, name: str | None = API) -> int:
    """The serial number of the certificate on a new connection."""
    context.check_hostname = False
    with (
        socket.create_connection(("127.0.0.1", tls_port(ingress.settings.port)), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        der = connection.getpeercert(binary_form=True)
        assert der is not None
        return x509.load_der_x509_certificate(der).serial_number


async def shows(ingress: RunningIngress, authority: PublicAuthority, server: Signed, name: str | None = API) -> None:
    def is_shown() -> bool:
        try:
            return shown(ingress, context_of(authority), name) == server.certificate.serial_number
        except OSError:
            return False

    deadline_s = asyncio.get_running_loop().time() + 60
    while not await asyncio.to_thread(is_shown):
        assert asyncio.get_running_loop().time() < deadline_s, ingress.reports[-1].observed.reason
        await asyncio.sleep(0.05)  # nothing announces a free port, so it is retried


async def worker_of(ingress: RunningIngress) -> str:
    """Read from HAProxy: a report can be older than a reload."""
    information = await ingress.haproxy.admin.send("show info")
    return next(line for line in information.splitlines() if line.startswith("Pid:"))


def client_of(ingress: RunningIngress, authority: PublicAuthority) -> AsyncOpenAI:
    transport = DefaultAsyncHttpxClient(verify=context_of(authority), timeout=60, trust_env=False)
    url = f"https://localhost:{tls_port(ingress.settings.port)}/v1"
    return AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=transport)


@pytest_asyncio.fixture
async def cell(ingress: RunningIngress) -> AsyncIterator[FakeCell]:
    async with FakeCell("a").running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(a="up")
        yield cell


@pytest.fixture
def first(authority: PublicAuthority) -> Signed:
    return authority.server(API, "localhost")


async def test_the_first_certificate_opens_a_port_and_the_end_of_the_last_one_closes_it(
    ingress: RunningIngress, cell: FakeCell, authority: PublicAuthority, first: Signed
) -> None:
    with pytest.raises(ConnectionRefusedError):
        shown(ingress, context_of(authority))
    ingress.ingress.receive(stated(authority, first))
    await shows(ingress, authority, first)
    async with client_of(ingress, authority) as client:
        assert await ask(client) == "a"
    assert (await ingress.post(BODY)).status_code == 200, "plain HTTP goes on"
    ingress.ingress.receive(stated(authority))
    await eventually(lambda: _is_refused(ingress), what="nobody listens")


def _is_refused(ingress: RunningIngress) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", tls_port(ingress.settings.port))) != 0


async def test_a_rotation_breaks_no_stream_and_fails_no_request_and_new_connections_see_it(
    ingress: RunningIngress, cell: FakeCell, authority: PublicAuthority, first: Signed
) -> None:
    ingress.ingress.receive(stated(authority, first))
    await shows(ingress, authority, first)
    pids = ingress.haproxy.pid, await worker_of(ingress)
    cell.release.clear()  # streams are under way while certificates change
    is_over = asyncio.Event()

    async def keep_asking() -> int:
        asked = 0
        while not is_over.is_set():
            async with client_of(ingress, authority) as client:  # a new connection each time
                await client.models.list()
            asked += 1
        return asked

    async with client_of(ingress, authority) as client:
        streams = [asyncio.create_task(read_stream(client)) for _ in range(10)]
        asking = asyncio.create_task(keep_asking())
        await eventually(lambda: cell.in_flight == 10)
        for _ in range(2):
            following = authority.server(API, "localhost")
            ingress.ingress.receive(stated(authority, following))
            await shows(ingress, authority, following)
        cell.release.set()
        texts = await asyncio.gather(*streams)
        is_over.set()
        assert await asking > 0
    assert len(set(texts)) == 1
    assert texts[0], "every stream came to its end"
    await eventually(lambda: ingress.reports[-1].observed.reason == "")
    assert (ingress.haproxy.pid, await worker_of(ingress)) == pids, "without a reload"


async def test_names_choose_the_certificate_and_an_unknown_one_gets_the_first(
    ingress: RunningIngress, cell: FakeCell, authority: PublicAuthority, first: Signed
) -> None:
    wild = authority.server("*.wild.example.test")
    ingress.ingress.receive(stated(authority, first, wild))
    await shows(ingress, authority, wild, "any.wild.example.test")
    for name in (API, "unknown.example.test", None):
        await shows(ingress, authority, first, name)


async def test_tls_below_1_2_is_refused_and_http_1_1_is_what_is_spoken(
    ingress: RunningIngress, cell: FakeCell, authority: PublicAuthority, first: Signed
) -> None:
    ingress.ingress.receive(stated(authority, first))
    await shows(ingress, authority, first)
    old = context_of(authority, ssl.TLSVersion.TLSv1_2)
    assert shown(ingress, old) == first.certificate.serial_number
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
        shown(ingress, old)
    both = context_of(authority)
    both.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", tls_port(ingress.settings.port))) as plain,
        both.wrap_socket(plain, server_hostname=API) as connection,
    ):
        assert connection.selected_alpn_protocol() == "http/1.1"


async def test_a_certificate_that_haproxy_refuses_costs_nothing_but_itself(
    ingress: RunningIngress, cell: FakeCell, authority: PublicAuthority, first: Signed
) -> None:
    ingress.ingress.receive(stated(authority, first))
    await shows(ingress, authority, first)
    worker = await worker_of(ingress)
    foreign = ServerCertificate("c-0", authority.chain(first) + authority.server(API).key_pem)
    ingress.ingress.receive(ApplicationTls("foreign", (foreign,)))
    await eventually(lambda: "certificates of applications are refused" in ingress.reports[-1].observed.reason)
    assert "PRIVATE KEY" not in ingress.reports[-1].observed.reason
    await shows(ingress, authority, first)
    other = FakeCell("b")
    async with other.running():
        await ingress.route(pool(cell, other))
        await ingress.sees(a="up", b="up")
    assert await worker_of(ingress) == worker
    ingress.ingress.receive(stated(authority, first))
    await eventually(lambda: ingress.reports[-1].observed.reason == "", what="the problem is over")


async def test_a_port_that_is_taken_is_said_and_taken_once_it_is_free(
    ingress: RunningIngress, cell: FakeCell, authority: PublicAuthority, first: Signed
) -> None:
    with socket.create_server(("127.0.0.1", tls_port(ingress.settings.port))):
        ingress.ingress.receive(stated(authority, first))
        await eventually(lambda: "is in use" in ingress.reports[-1].observed.reason)
        await ingress.route(pool(cell), retry_after_s=9)
        assert (await ingress.post(BODY)).status_code == 200, "tables go on meanwhile"
    await shows(ingress, authority, first)
    await eventually(lambda: ingress.reports[-1].observed.reason == "")


async def test_an_agent_that_starts_anew_shows_what_it_was_told_before(
    ingress: RunningIngress, cell: FakeCell, authority: PublicAuthority, first: Signed
) -> None:
    ingress.ingress.receive(stated(authority, first))
    await shows(ingress, authority, first)
    await ingress.die()
    later = RunningIngress(ingress.settings.state_dir)
    later.use(ingress.settings)
    async with later.running():
        await shows(later, authority, first)
        later.ingress.receive(stated(authority, following := authority.server(API)))
        await shows(later, authority, following)
        worker = await worker_of(later)
        await later.haproxy.kill()
        await shows(later, authority, following)
        assert await worker_of(later) != worker


async def test_the_key_is_in_files_of_the_agent_alone_and_in_no_log_report_or_process_list(
    ingress: RunningIngress, cell: FakeCell, authority: PublicAuthority, first: Signed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    message = stated(authority, first)
    ingress.ingress.receive(message)
    await shows(ingress, authority, first)
    following = authority.server(API, "localhost")
    ingress.ingress.receive(stated(authority, following))
    await shows(ingress, authority, following)
    secrets = [line for server in (first, following) for line in server.key_pem.splitlines()[1:-1]]
    said = caplog.text + repr(message) + repr(ingress.ingress.serving.running) + str(ingress.reports)
    said += " ".join(word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or ())
    home = ingress.settings.state_dir
    holding = set()
    for path in (path for path in home.rglob("*") if path.is_file()):
        text = path.read_bytes().decode("utf-8", "replace")
        if any(secret in text for secret in secrets) or any(json.dumps(secret)[1:-1] in text for secret in secrets):
            holding.add(path.relative_to(home).as_posix())
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    assert holding == {"applications.json", f"{APPLICATION_FOLDER}/c-0.pem"}
    assert not any(secret in said for secret in secrets)
    ingress.ingress.receive(stated(authority))
    await eventually(
        lambda: not (home / APPLICATION_FOLDER / "c-0.pem").exists(), what="the key is gone with its certificate"
    )


@pytest.mark.parametrize(("plain_http", "status"), [(PlainHttp.REFUSE, 403), (PlainHttp.LOOPBACK, 200)])
async def test_plain_http_is_for_whom_the_region_says(
    ingress: RunningIngress,
    cell: FakeCell,
    authority: PublicAuthority,
    first: Signed,
    plain_http: PlainHttp,
    status: int,
) -> None:
    ingress.ingress.receive(stated(authority, first, plain_http=plain_http))
    await shows(ingress, authority, first)
    answer = await ingress.post(BODY)
    assert answer.status_code == status
    if status == 403:
        port = tls_port(ingress.settings.port)
        assert answer.json()["error"]["code"] == "tls_required"
        assert f"use https and port {port}" in answer.text
    assert (await ingress.http.get("/healthz")).status_code == 200
    async with client_of(ingress, authority) as client:
        assert await ask(client) == "a"
    assert (await ingress.post_hop(BODY)).status_code == 200, "other regions have a port of their own"


async def test_handshakes_that_nobody_finishes_take_nothing_from_the_port_without_tls(
    ingress: RunningIngress, cell: FakeCell, authority: PublicAuthority, first: Signed
) -> None:
    ingress.ingress.receive(stated(authority, first))
    await shows(ingress, authority, first)
    address = ("127.0.0.1", tls_port(ingress.settings.port))
    silent = [socket.create_connection(address) for _ in range(ingress.settings.max_outside_connections)]
    try:
        await answers(ingress, 200)  # the cell is in this process, and answered no request while those were opened
        assert (await ingress.post_hop(BODY)).status_code == 200
    finally:
        for each in silent:
            each.close()
    await shows(ingress, authority, first)


async def test_whom_to_serve_without_tls_waits_for_no_certificate(
    ingress: RunningIngress, cell: FakeCell, authority: PublicAuthority, first: Signed
) -> None:
    with socket.create_server(("127.0.0.1", tls_port(ingress.settings.port))):
        ingress.ingress.receive(stated(authority, first, plain_http=PlainHttp.REFUSE))
        await answers(ingress, 403)
    await shows(ingress, authority, first)
    sealed = ApplicationTls("sealed", (ServerCertificate("c-0", ""), ServerCertificate("c-1", "")), "loopback")
    ingress.ingress.receive(sealed)
    await answers(ingress, 200)
    await shows(ingress, authority, first)
    await ingress.die()
    kept = ingress.settings.state_dir / "applications.json"
    assert first.key_pem.splitlines()[1] in kept.read_text(), "what it had is kept with what it was told"
    kept.write_text("{")
    later = RunningIngress(ingress.settings.state_dir)
    later.use(ingress.settings)
    async with later.running():
        await answers(later, 403)
        assert "plain HTTP is refused until they are known" in later.reports[-1].observed.reason
        again = ApplicationTlsState(ingress.settings, None)  # type: ignore[arg-type]  # it is not run
        again.resume()
        assert again.in_force.plain_http is PlainHttp.REFUSE, "the next start finds what was damaged no more"
        assert "plain HTTP is refused until they are known" in again.problem
        later.ingress.receive(stated(authority, first))
        await answers(later, 200)


async def answers(ingress: RunningIngress, status: int) -> None:
    """Until then each request has its own connection: a reload closes those without a request."""
    async with asyncio.timeout(60):
        while (await ingress.post(BODY, connection="close")).status_code != status:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.05)  # until the next health check, or the next table
