"""vLLM sleeps only on GPUs, so its engine is a stand-in here: what it is asked for, and when."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_agent.engines.usage_ledger import Receive, Scope, Send
from engine_agent.engines.vllm.idle_sleep import SLEEP_VARIABLE, IdleSleep
from engine_agent.engines.vllm.options import parse
from engine_agent.engines.vllm.serve import IDLE_SLEEP, node_environment, vllm_argv
from tests.engine_agent.engines.vllm.test_serve import command_line

pytestmark = pytest.mark.asyncio
OPTIONS = command_line(1, Path("/m"), "sha256:1")


class Engine:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.falling, self.asleep = asyncio.Event(), asyncio.Event()
        self.may_sleep = asyncio.Event()
        self.may_sleep.set()
        self.fails = False

    async def sleep(self, level: int, mode: str) -> None:
        self.falling.set()
        await self.may_sleep.wait()
        self.calls.append(f"sleep {level} {mode}")
        self.asleep.set()

    async def wake_up(self) -> None:
        if self.fails:
            raise RuntimeError("no memory")
        self.asleep.clear()
        self.calls.append("wake")

    async def collective_rpc(self, method: str) -> None:
        self.calls.append(method)


async def ask(sleeper: IdleSleep, engine: Engine, method: str = "POST") -> None:
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    await sleeper({"type": "http", "method": method, "path": "/v1/completions", "app": app}, receive, send)


async def receive() -> Any:
    return {}


async def send(_message: Any) -> None: ...


def answering(monkeypatch: pytest.MonkeyPatch, engine: Engine, stated: str) -> IdleSleep:
    monkeypatch.setenv(SLEEP_VARIABLE, stated)

    async def answer(scope: Scope, _receive: Receive, _send: Send) -> None:
        engine.calls.append(scope["method"])

    return IdleSleep(answer)


async def test_an_idle_engine_sleeps_until_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    sleeper = answering(monkeypatch, engine, "0 1")
    await ask(sleeper, engine)
    await engine.asleep.wait()
    await ask(sleeper, engine, "GET")  # health and metrics do not wake it
    await ask(sleeper, engine)
    assert engine.calls == ["POST", "sleep 1 wait", "GET", "wake", "POST"]


async def test_at_level_2_the_weights_are_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    sleeper = answering(monkeypatch, engine, "0 2")
    await ask(sleeper, engine)
    await engine.asleep.wait()
    await asyncio.gather(ask(sleeper, engine), ask(sleeper, engine))
    assert engine.calls == ["POST", "sleep 2 wait", "wake", "reload_weights", "POST", "POST"]


async def test_a_request_while_it_falls_asleep_waits_and_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.may_sleep.clear()
    sleeper = answering(monkeypatch, engine, "0 1")
    await ask(sleeper, engine)
    await engine.falling.wait()
    second = asyncio.create_task(ask(sleeper, engine))
    await asyncio.sleep(0)
    engine.may_sleep.set()
    await second
    assert engine.calls == ["POST", "sleep 1 wait", "wake", "POST"]


async def test_a_failed_wake_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    sleeper = answering(monkeypatch, engine, "0 1")
    await ask(sleeper, engine)
    await engine.asleep.wait()
    engine.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        await ask(sleeper, engine)
    engine.fails = False
    await ask(sleeper, engine)
    assert engine.calls[-2:] == ["wake", "POST"]


async def test_the_launcher_turns_it_on_without_vllms_development_routes(capfd: pytest.CaptureFixture[str]) -> None:
    options = parse([*OPTIONS, "--", "--sleep-idle-seconds", "600", "--sleep-level", "2", "--seed", "1"], {})
    assert options.vllm_args == ("--seed", "1")
    argv = vllm_argv(options)
    assert argv[argv.index("--enable-sleep-mode") + 1 :][:2] == ["--middleware", IDLE_SLEEP]
    environment = node_environment(options, Path("/run"), 4, {})
    assert environment[SLEEP_VARIABLE] == "600 2"
    assert "VLLM_SERVER_DEV_MODE" not in environment
    assert "--enable-sleep-mode" not in vllm_argv(parse(OPTIONS, {}))
    with pytest.raises(SystemExit):
        parse([*OPTIONS, "--", "--sleep-idle-seconds", "600", "--sleep-level", "3"], {})
    assert "--sleep-level 1 or 2" in capfd.readouterr().err
