"""The administration port of the simulator's members, which injects faults."""

import os
import signal
from asyncio import get_running_loop
from collections.abc import Callable

import msgspec

from engine_agent.engines.openai_http import (
    BodyTooLarge,
    ClientLeft,
    HealthPage,
    Receive,
    Routes,
    Scope,
    Send,
    find_route,
    read_body,
    respond,
)
from engine_agent.engines.sim.faults import BadFault, Crash, Error, Faults, parse_fault
from engine_agent.protocol.messages import StepTimes
from engine_agent.protocol.states import MemberRole

_CRASH_AFTER_S = 0.02
"""Lets the response to the crash request leave the process."""


class AdminServer:
    """The administration port of every member: its health, its steps, and faults to inject and remove."""

    def __init__(
        self, faults: Faults, health: HealthPage, role: MemberRole, steps: Callable[[], StepTimes] = StepTimes
    ) -> None:
        self._steps = steps
        self._faults = faults
        self._role = role
        self._routes: Routes = {
            ("GET", "/health"): health,
            ("GET", "/steps"): self._steps_page,
            ("GET", "/fault"): self._show,
            ("POST", "/fault"): self._put_fault,
            ("DELETE", "/fault"): self._clear,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = find_route(self._routes, scope)
        if isinstance(route, int):
            await _respond_error(send, route, f"no {scope['method']} {scope['path']} here")
        else:
            await route(scope, receive, send)

    async def _steps_page(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, 200, msgspec.json.encode(self._steps()))

    async def _show(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, 200, msgspec.json.encode({"faults": self._faults.in_force()}))

    async def _clear(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._faults.clear()
        await self._show(scope, receive, send)

    async def _put_fault(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            fault = parse_fault(await read_body(receive))
        except ClientLeft:
            return
        except (BadFault, BodyTooLarge) as error:
            await _respond_error(send, 400, str(error))
            return
        if isinstance(fault, Error) and self._role is MemberRole.FOLLOWER:
            await _respond_error(send, 400, "kind: a follower answers no requests; put `error` into the leader")
            return
        if isinstance(fault, Crash):
            get_running_loop().call_later(_CRASH_AFTER_S, os.kill, os.getpid(), signal.SIGKILL)
        self._faults.put(fault)
        await self._show(scope, receive, send)


async def _respond_error(send: Send, status: int, message: str) -> None:
    await respond(send, status, msgspec.json.encode({"error": message}))
