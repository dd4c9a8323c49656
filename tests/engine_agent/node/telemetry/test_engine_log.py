"""What the runtime writes is judged while the engine runs, each line once, whatever happens to the file."""

from pathlib import Path

import pytest

from engine_agent.node.telemetry import fault_logs
from engine_agent.node.telemetry.fault_logs import EngineLog
from engine_agent.protocol.messages import Fault

SRAM = (
    "[ND 0][NC 0] Uncorrectable memory error is detected, metadata: 0x16. Please terminate or stop/start this instance"
)
HBM = "Uncorrectable HBM memory error is detected. Execution results may be invalid."
RELOAD = "Please reload the neuron driver or reboot"
DMA = "[MLA 0][NC 0] DMA TX engine 0 is in an abort state"


class Log:
    def __init__(self, path: Path) -> None:
        self.path, self.faults = path, list[Fault]()
        self.log = EngineLog(path, self.faults.append)

    def says(self, *lines: str, end: str = "\n") -> None:
        with self.path.open("a") as file:
            file.write("\n".join(lines) + end)
        self.log.read()

    def signatures(self) -> list[str]:
        self.log.read()
        return [fault.signature for fault in self.faults]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    made = Log(tmp_path / "engine.log")
    made.log.read()
    return made


def test_a_fault_is_heard_while_the_engine_runs_and_once(log: Log) -> None:
    log.says("loading", SRAM, "going on", "and on")
    log.says("and on")
    assert log.signatures() == ["neuron_sram_uncorrectable"]


def test_a_line_waits_for_what_follows_it(log: Log) -> None:
    log.says(HBM)
    assert log.faults == []
    log.says("some line", RELOAD)
    assert log.signatures() == ["neuron_hbm_repairable"]


def test_a_line_that_nothing_follows_is_judged_at_the_next_look(log: Log) -> None:
    log.says(HBM)
    assert log.signatures() == ["neuron_hbm_uncorrectable"]


def test_half_a_line_waits_for_its_end(log: Log) -> None:
    log.says(DMA[:20], end="")
    log.says(DMA[20:])
    assert log.signatures() == ["neuron_dma_error"]


def test_a_log_that_is_cut_or_replaced_is_read_from_its_beginning(log: Log) -> None:
    log.says("long " * 100)
    log.path.write_text("")
    log.says(SRAM)
    log.path.unlink()
    log.says(DMA)
    assert log.signatures() == ["neuron_sram_uncorrectable", "neuron_dma_error"]


def test_what_was_there_before_the_agent_is_not_judged_again(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text(SRAM + "\n")
    log = Log(tmp_path / "engine.log")
    log.says("more")
    assert log.signatures() == []


def test_a_flood_is_read_from_its_end(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_logs, "MOST_BYTES", 4096)
    log.says(*["x" * 80] * 1000, DMA)
    assert log.signatures() == ["neuron_dma_error"]
