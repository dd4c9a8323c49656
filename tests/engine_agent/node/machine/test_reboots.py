"""A host reboots once for an order, wherever its agent is killed, and never without its operator's permission."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from engine_agent.node.machine.agent import MachineAgent
from engine_agent.node.machine.paths import HostPaths
from engine_agent.node.machine.reboots import REBOOT_LIMIT_S, Reboots, run_command, this_boot
from engine_agent.protocol.machine_messages import MachineOrder
from tests.engine_agent.node.machine.test_agent import agent, reported

__all__ = ["agent"]  # a fixture


class Killed(BaseException):
    """The process ends here."""


class Power:
    """A host whose agent starts again after each death. `boots` grows when the command runs."""

    def __init__(self, paths: HostPaths) -> None:
        self.paths, self.runs, self.boots, self.now_s = paths, 0, 0, 100.0
        paths.home.mkdir(parents=True, exist_ok=True)
        paths.reboot_command.write_text("shutdown -r now\n")
        paths.reboot_command.chmod(0o600)

    def agent(self, run: Callable[[str], str] | None = None) -> Reboots:
        return Reboots(self.paths, boot=f"boot {self.boots}", run=run or self.reboot, now_s=lambda: self.now_s)

    def reboot(self, command: str) -> str:
        assert command == "shutdown -r now"
        self.runs += 1
        self.boots += 1
        raise Killed


@pytest.fixture
def power(tmp_path: Path) -> Power:
    return Power(HostPaths(tmp_path))


def test_an_order_reboots_the_host_once_however_often_it_is_sent(power: Power) -> None:
    with pytest.raises(Killed):
        power.agent().follow("1")
    for _ in range(3):
        again = power.agent()
        again.follow("1")
        assert again.result() == ("1", "")
    assert power.runs == 1
    with pytest.raises(Killed):
        power.agent().follow("2")
    assert (power.runs, power.agent().result()) == (2, ("2", ""))


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("after", [False, True])
def test_killed_between_two_lines_it_never_reboots_twice(
    power: Power, monkeypatch: pytest.MonkeyPatch, call: str, nth: int, after: bool
) -> None:
    """The agent dies before or after its nth call of the system, and the control plane sends the order again."""
    made, real = 0, getattr(os, call)

    def dies(*arguments: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made == nth and not after:
            raise Killed
        answer = real(*arguments, **options)
        if made == nth:
            raise Killed
        return answer

    first = power.agent()
    with monkeypatch.context() as patched:
        patched.setattr(os, call, dies)
        with pytest.raises(Killed):
            first.follow("1")
    for _ in range(3):
        try:
            power.agent().follow("1")
        except Killed:
            assert power.runs == 1
    power.now_s += REBOOT_LIMIT_S + 1
    order, trouble = power.agent().result()
    assert order == "1"
    assert (power.runs, trouble) in [
        (1, ""),
        (0, "the host did not reboot within 5 min; the order is not repeated"),
    ]


def test_a_host_that_is_going_down_has_no_result_yet(power: Power) -> None:
    goes_down = power.agent(lambda command: "")
    goes_down.follow("1")
    assert goes_down.result() == ("", "")
    assert power.agent().result() == ("", ""), "also of an agent that its supervisor started meanwhile"


def test_a_failed_command_is_the_result_and_is_not_repeated(power: Power) -> None:
    failed = power.agent(lambda command: "`shutdown` failed with status 1: not permitted")
    failed.follow("1")
    for one in (failed, power.agent()):
        one.follow("1")
        assert one.result() == ("1", "`shutdown` failed with status 1: not permitted")
    assert power.runs == 0


def forbid(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_text(" \n")


def open_to_others(path: Path) -> None:
    path.chmod(0o622)


def not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (forbid, "its operator does not allow reboots: "),
        (empty, "reboot-command is empty: write the command"),
        (open_to_others, "others may write "),
        (not_text, "cannot be read: "),
    ],
)
def test_without_permission_the_order_is_refused_by_name(
    power: Power, change: Callable[[Path], None], says: str
) -> None:
    change(power.paths.reboot_command)
    refusing = power.agent()
    refusing.follow("1")
    order, trouble = refusing.result()
    assert (order, refusing.is_allowed, power.runs) == ("1", False, 0)
    assert says in trouble
    power.paths.reboot_command.write_text("shutdown -r now")
    power.paths.reboot_command.chmod(0o600)
    refusing.follow("1")
    assert power.runs == 0, "what was refused stays refused"
    with pytest.raises(Killed):
        refusing.follow("2")


def test_an_order_that_cannot_be_recorded_is_not_carried_out(power: Power, monkeypatch: pytest.MonkeyPatch) -> None:
    full = power.agent()

    def refuse(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", refuse)
        full.follow("1")
    assert full.result() == ("1", "the order cannot be recorded: No space left on device")
    assert power.runs == 0


def test_a_damaged_record_refuses_the_order_that_it_may_have_been(power: Power) -> None:
    (power.paths.home / "reboot.json").write_text('{"order": "1", "bo')
    damaged = power.agent()
    damaged.follow("1")
    assert (power.runs, damaged.result()[0]) == (0, "1")
    assert "its record of reboots was damaged" in damaged.result()[1]


def test_without_a_known_boot_nothing_is_rebooted(power: Power) -> None:
    unknown = Reboots(power.paths, boot="", run=power.reboot, now_s=lambda: power.now_s)
    unknown.follow("1")
    assert unknown.result() == ("1", "the kernel does not show its boot ID, so it is not known what rebooted")
    assert power.runs == 0


def test_the_command_of_an_operator_runs_in_a_shell(tmp_path: Path) -> None:
    assert run_command(f"echo rebooted > {tmp_path}/done && true") == ""
    assert (tmp_path / "done").read_text() == "rebooted\n"
    assert run_command("echo not permitted >&2; exit 3") == (
        "`echo not permitted >&2; exit 3` failed with status 3: not permitted"
    )


def test_a_boot_is_known_by_its_kernel_and_its_first_process(tmp_path: Path) -> None:
    assert this_boot() == this_boot()
    assert this_boot(tmp_path) == ""
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("b0\n")
    assert this_boot(tmp_path) == "b0", "process 1 is hidden"
    (tmp_path / "1").mkdir()
    fields = " ".join(str(number) for number in range(4, 30))
    (tmp_path / "1/stat").write_text(f"1 (a ) b) S {fields}\n")
    assert this_boot(tmp_path) == "b0 22"


@pytest.mark.asyncio
async def test_the_agent_reports_permission_and_result_and_follows_no_order_from_its_journal(
    agent: MachineAgent, power: Power, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = cast(Any, agent)
    done: list[str] = []

    def refuse(command: str) -> str:
        done.append(command)
        return "too busy"

    monkeypatch.setattr(inside, "_reboots", power.agent(refuse))
    order = MachineOrder("m-1", 1, reboot="1")
    inside._order = order
    await inside._pass()
    assert (done, reported(agent).may_reboot, reported(agent).rebooted) == ([], True, "")
    for _ in range(2):
        inside._on_message(order)
        await inside._pass()
    assert done == ["shutdown -r now"]
    assert (reported(agent).rebooted, reported(agent).reboot_trouble) == ("1", "too busy")
    inside._on_message(msgspec.structs.replace(order, version=2, reboot="2", leave=True))
    await inside._pass()
    assert done == ["shutdown -r now"], "a host that leaves is not rebooted"
