"""How applications reach an ingress: the control plane's last statement, checked, journalled, then in force. A
statement that cannot be carried out changes nothing. The last valid one survives a restart and the loss of the control
plane."""

import asyncio
import logging
from dataclasses import replace

from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.certificates import ApplicationCertificates, Applications, applications_from
from engine_agent.ingress.command_socket import CommandRefused, Unreachable
from engine_agent.ingress.desired import DesiredHaproxy
from engine_agent.ingress.haproxy import ConfigRejected, HaproxyProcess, is_taken
from engine_agent.ingress.running import RunningHaproxy
from engine_agent.ingress.settings import IngressSettings
from engine_agent.node.journal import CorruptJournal, Journal
from engine_agent.protocol.ingress_messages import ApplicationTls, ServerCertificate
from engine_agent.protocol.ports import tls_port
from engine_agent.protocol.states import PlainHttp

log = logging.getLogger(__name__)

JOURNAL_FILE = "applications.json"
UNKNOWN = ApplicationTls("", (), PlainHttp.REFUSE.value)
"""Replaces an unreadable journal. Without a file, the next start would serve plain HTTP to all clients."""
TRY_AGAIN_S = 2.0
"""Pause after a port in use or a full disk."""


class ApplicationTlsState:
    """The state of one ingress. `process`: the HAProxy for applications. `problem`: why something is not in force."""

    def __init__(self, settings: IngressSettings, process: HaproxyProcess) -> None:
        self._settings = settings
        self._process = process
        self._journal = Journal(settings.state_dir / JOURNAL_FILE, ApplicationTls)
        self._certificates = ApplicationCertificates()
        self._pending: ApplicationTls | None = None
        self._version = ""
        self._accept_at_s = 0.0
        self._refusal = ""
        self._load_problem = ""
        self.in_force = Applications()

    @property
    def problem(self) -> str:
        return "; ".join(filter(None, (self._refusal, self._load_problem)))

    def receive(self, stated: ApplicationTls) -> None:
        """Stores a statement of the control plane for `accept`."""
        self._pending, self._accept_at_s = stated, 0.0

    def resume(self) -> None:
        """Loads the statement that was in force before the restart."""
        try:
            stated = self._journal.load()
            if stated == UNKNOWN:
                raise BadTable("the journal was damaged")
            if stated is not None:
                self.in_force, self._version = applications_from(stated, self.in_force), stated.version
        except (CorruptJournal, BadTable, OSError) as error:
            # The statement may have refused plain HTTP, and prompts must not be sent in plain text by mistake.
            self.in_force = Applications(plain_http=PlainHttp.REFUSE)
            self._refuse(f"certificates of applications, and so plain HTTP is refused until they are known: {error}")
            if isinstance(error, CorruptJournal):
                self._keep_unknown()

    def _keep_unknown(self) -> None:
        try:
            self._journal.save(UNKNOWN)
        except OSError as error:
            log.error(
                "the next start would serve plain HTTP to all clients; the setting cannot be journalled: %s", error
            )

    async def accept(self, desired: DesiredHaproxy) -> bool:
        """Puts the received statement into force, if HAProxy accepts it together with the rest of `desired`. Returns
        whether it is in force and differs from the previous one."""
        stated, now_s = self._pending, asyncio.get_running_loop().time()
        if stated is None or now_s < self._accept_at_s:
            return False
        self._pending = None
        if stated.version == self._version:
            self._refusal = ""
            return False
        try:
            wanted = applications_from(stated, self.in_force)
            self._require_port(wanted)
            await self._process.check(replace(desired, applications=wanted))
            self._journal.save(_with_previous_pem(stated, wanted))
        except (BadTable, ConfigRejected) as error:
            self._refuse(f"certificates of applications are refused: {error}")
            return self._follow_plain_http(stated)
        except OSError as error:
            if self._pending is None:
                self._pending, self._accept_at_s = stated, now_s + TRY_AGAIN_S
            self._refuse(f"certificates of applications wait: {error}")
            return self._follow_plain_http(stated)
        self.in_force, self._version, self._refusal = wanted, stated.version, ""
        return True

    async def load(self, running: RunningHaproxy | None) -> None:
        """Loads the certificates in force into HAProxy. Failures are retried by the next call."""
        if running is None:
            return
        try:
            if await self._certificates.load(running.life, self.in_force.certificates, self._process.admin):
                log.info("HAProxy shows the certificates of applications that are in force now")
            self._load_problem = ""
        except (CommandRefused, Unreachable, OSError) as error:
            self._load_problem = f"certificates of applications: {error}"

    def _require_port(self, wanted: Applications) -> None:
        """Checks the port before HAProxy listens on it: HAProxy would not start, or would share it with another
        process."""
        host, port = self._settings.host, tls_port(self._settings.port)
        if wanted.certificates and not self.in_force.certificates and is_taken(host, port):
            raise OSError(f"{host}:{port} is in use: stop the process that listens there (`ss -ltnp` names it)")

    def _follow_plain_http(self, stated: ApplicationTls) -> bool:
        """Applies the setting for plain HTTP without waiting for certificates. Returns whether it changed."""
        if stated.plain_http not in tuple(PlainHttp) or stated.plain_http == self.in_force.plain_http:
            return False
        self.in_force = replace(self.in_force, plain_http=PlainHttp(stated.plain_http))
        return True

    def _refuse(self, problem: str) -> None:
        if problem != self._refusal:
            log.error("%s", problem)
        self._refusal = problem


def _with_previous_pem(stated: ApplicationTls, wanted: Applications) -> ApplicationTls:
    """The statement, with the previous PEM of certificates that came without."""
    certificates = tuple(ServerCertificate(name, pem) for name, pem in wanted.certificates.items())
    return ApplicationTls(stated.version, certificates, stated.plain_http)
