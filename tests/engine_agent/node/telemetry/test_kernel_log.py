"""The kernel log is followed as it grows, in its own format; a pipe stands in for the device."""

import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from engine_agent.node.telemetry.fault_logs import LOOKBACK_S, KernelLog
from tests.engine_agent.fake_control_plane import eventually

RECORDS = (Path(__file__).parent / "recorded" / "kmsg.txt").read_text()
Write = Callable[[str], None]


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    return path


@pytest_asyncio.fixture
async def followed(pipe: Path) -> AsyncIterator[tuple[list[str], Write]]:
    lines: list[str] = []
    log = KernelLog(lines.append, pipe)
    assert log.open() == ""
    writer = os.open(pipe, os.O_WRONLY)

    def write(text: str) -> None:
        os.write(writer, text.encode())

    yield lines, write
    log.close()
    os.close(writer)


def now_us(ago_s: float = 0.0) -> int:
    return int((time.monotonic() - ago_s) * 1e6)


@pytest.mark.asyncio
async def test_lines_come_without_their_prefix_and_details(followed: tuple[list[str], Write]) -> None:
    lines, write = followed
    write(RECORDS.replace("{now}", str(now_us())))
    await eventually(lambda: len(lines) == 2)
    assert lines[0] == "neuron 0000:cc:00.0: nd0: reset completed"
    assert lines[1].startswith("NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=")


@pytest.mark.asyncio
async def test_what_is_older_than_the_lookback_or_no_record_is_passed_over(followed: tuple[list[str], Write]) -> None:
    lines, write = followed
    write(f"3,1,{now_us(LOOKBACK_S + 5)},-;old\nnonsense\n3,2;short\n3,3,x,-;bad\n3,4,{now_us(1)},-;new\n")
    await eventually(lambda: lines == ["new"])


@pytest.mark.asyncio
async def test_a_log_that_cannot_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    log = KernelLog(print, tmp_path / "none")
    assert log.open() == f"{tmp_path / 'none'} cannot be read: No such file or directory"
    log.close()
