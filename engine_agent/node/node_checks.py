"""Runs a node's deep checks: once per request of its order, and before it joins on a machine with accelerators, then
after those of doctor. The checks run in a child at low priority with a time limit; its failure does not affect the
agent. Results are reported until the next ones. A failed check is also a fault, on which the fleet's rules act. The
last request and its results are on disk, so that a restarted agent does not repeat it."""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import structs

from engine_agent.engines.base import EngineUnavailable
from engine_agent.node import procfs
from engine_agent.node.checks.reset import CHECK as RESET
from engine_agent.node.checks.result import Result, result_from
from engine_agent.node.telemetry.fingerprint import AGENT_ROOT
from engine_agent.protocol.messages import CheckRequest, Fault
from engine_agent.protocol.ports import RENDEZVOUS, RENDEZVOUS_SLOTS
from engine_agent.protocol.signatures import FaultSignature, is_hard
from engine_agent.protocol.strict_json import strict_loads
from engine_agent.protocol.telemetry_messages import CHECKS_MAX, CheckReport, CheckResult

log = logging.getLogger(__name__)

DONE_FILE = "checks-done"
"""In the node's home: the completed requests by name; for `joining` the machine's boot."""
REPORT_FILE = "checks.json"
JOINING = "joining"
VARIABLE = "SWITCHYARD_DEEP_CHECKS"
"""`on` or `off`: whether they run before the node joins. Default: if there are accelerators."""
LIMIT_S = 300.0
JOINING_LIMIT_S = 60.0
"""Before a node joins: a machine of a pool must have joined within 120 s of its launch. Checks that did not finish are
reported as such."""
LINK_CHECKS = frozenset({"links", "collective"})
LINK_PORT = RENDEZVOUS + RENDEZVOUS_SLOTS - 1
"""The last rendezvous port: a node without an engine does not use it."""


class NodeChecks:
    """The deep checks of one node. `on_fault` gets failed checks; `on_change` is called when there is something to
    report. `variables`: added to the environment of the checks, so that they see only the node's devices. `reset`:
    resets devices of the node, on request and only while no engine runs."""

    def __init__(
        self,
        home: Path,
        pythons: Callable[[], Sequence[Path]],
        on_fault: Callable[[Fault], None],
        on_change: Callable[[], None],
        variables: Callable[[], Mapping[str, str]] = dict,
        reset: Callable[[Sequence[str]], Awaitable[Result]] | None = None,
    ) -> None:
        self._home, self._pythons, self._variables = home, pythons, variables
        self._on_fault, self._on_change, self._reset = on_fault, on_change, reset
        self.report = self._stored_report()

    async def run_before_joining(self, accelerators: int, variable: str | None = None) -> None:
        """Runs them once per boot of the machine."""
        wanted = os.environ.get(VARIABLE, "") if variable is None else variable
        if wanted == "off" or (wanted != "on" and not accelerators):
            return
        boot = procfs.boot_id()
        if self._done().get(JOINING) == boot:
            return
        await self._check(CheckRequest(JOINING), is_serving=False, limit_s=JOINING_LIMIT_S)
        self._note_done(JOINING, boot)

    async def run_requested(self, request: CheckRequest | None, *, is_serving: bool) -> None:
        """Runs the checks that the order in force requests, if they did not run yet."""
        if request is None or self._done().get("request") == request.id:
            return
        self._note_done("request", request.id)  # first: checks that crash the agent must not run again
        await self._check(request, is_serving=is_serving, limit_s=LIMIT_S)

    async def _check(self, request: CheckRequest, *, is_serving: bool, limit_s: float) -> None:
        began_at, results = time.time(), list[Result]()
        self._publish(CheckReport(request.id, began_at))
        if request.reset is not None:
            results.append(await self._reset_devices(request.reset, is_serving=is_serving))
        argv = [sys.executable, "-m", "engine_agent", "deep-checks", "--state", str(self._home)]
        argv += ["--light"] if is_serving else [word for each in self._pythons() for word in ("--python", str(each))]
        plan = b"" if is_serving else _links(request)
        argv += ["--links"] if plan else []
        argv += ["--arriving"] if request.id == JOINING else []
        log.info(
            "deep checks %s begin%s", request.id, " without computing, because an engine runs" if is_serving else ""
        )
        try:
            ended = await self._run(argv, plan, CheckReport(request.id, began_at), results, limit_s)
        except (OSError, EngineUnavailable) as error:
            ended = f"they could not start: {error}"
        if ended:
            results.append(Result("deep checks", None, ended))
        self._publish(CheckReport(request.id, began_at, time.time(), _on_wire(results)))
        self._store_report()
        for result in results:
            log.log(logging.ERROR if result.ok is False else logging.INFO, "%s: %s", result.check, result.found)
            if result.ok is False and result.check != RESET:
                self._on_fault(_fault(result, request))

    async def _reset_devices(self, named: Sequence[str], *, is_serving: bool) -> Result:
        """A reset that fails is no new fault."""
        if self._reset is None or is_serving:
            return Result(RESET, False, "an engine runs on the node" if is_serving else "this agent resets nothing")
        try:
            return await self._reset(named)
        except OSError as error:
            return Result(RESET, False, f"it could not start: {error}")

    async def _run(
        self, argv: Sequence[str], plan: bytes, report: CheckReport, results: list[Result], limit_s: float
    ) -> str:
        """Returns why they did not exit normally, or an empty text."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=AGENT_ROOT,
            env={**os.environ, **self._variables()},
            start_new_session=True,
        )
        if process.stdin is None or process.stdout is None:
            return "they have no pipes"
        try:
            async with asyncio.timeout(limit_s):
                process.stdin.write(plan)
                process.stdin.close()
                async for line in process.stdout:
                    with suppress(ValueError):
                        results.append(result_from(line))
                        self._publish(structs.replace(report, results=_on_wire(results)))
                status = await process.wait()
            return "" if status in (0, 1) else f"they exited with status {status}"
        except TimeoutError:
            return f"they did not finish within {limit_s:.0f} s"
        finally:
            await _kill_session(process)

    def _publish(self, report: CheckReport) -> None:
        self.report = report
        self._on_change()

    def _stored_report(self) -> CheckReport | None:
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((self._home / REPORT_FILE).read_bytes(), type=CheckReport)
        return None

    def _store_report(self) -> None:
        try:
            (self._home / REPORT_FILE).write_bytes(msgspec.json.encode(self.report))
        except OSError as error:
            log.error("cannot store the results of deep checks: %s", error)

    def _done(self) -> dict[str, str]:
        with suppress(OSError, ValueError):
            known = strict_loads((self._home / DONE_FILE).read_text())
            if isinstance(known, dict):
                return {str(name): str(value) for name, value in known.items()}
        return {}

    def _note_done(self, name: str, value: str) -> None:
        try:
            (self._home / DONE_FILE).write_text(json.dumps({**self._done(), name: value}))
        except OSError as error:
            log.error("cannot record that deep checks ran: %s", error)


async def _kill_session(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


def _links(request: CheckRequest) -> bytes:
    if not request.peers:
        return b""
    members = [
        {"rank": peer.rank, "address": peer.address, "port": peer.port_base + LINK_PORT} for peer in request.peers
    ]
    return json.dumps({"rank": request.rank, "members": members, "secret": request.secret}).encode()


def _on_wire(results: Sequence[Result]) -> tuple[CheckResult, ...]:
    return tuple(
        CheckResult(one.check[:64], one.ok, one.found, one.wanted, one.seconds, dict(one.numbers))
        for one in results[:CHECKS_MAX]
    )


def _fault(result: Result, request: CheckRequest) -> Fault:
    is_of_links = result.check in LINK_CHECKS
    signature = FaultSignature.LINK_CHECK_FAILED if is_of_links else FaultSignature.DEEP_CHECK_FAILED
    evidence = {"check": result.check, "request": request.id, "wanted": result.wanted, "numbers": dict(result.numbers)}
    return Fault(signature, f"{result.check}: {result.found}", {**evidence, "hard": is_hard(signature)})
