"""Faults are found in the kernel log and in the logs of engines."""

import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from engine_agent.node.telemetry import fault_logs
from engine_agent.node.telemetry.fault_logs import LOOKBACK_S, EngineLog, KernelLog, kernel_fault, runtime_faults
from engine_agent.protocol.messages import Fault
from engine_agent.protocol.signatures import FaultSignature as Signature
from engine_agent.protocol.signatures import is_hard
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


DOCUMENTED = (
    "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0592464924bd45322 hostname=ip-172-31-61-252 nd-id=0 nc-id=0 "
    "serial-num=19fcda00f5ff6eb9 action=TERMINATE_INSTANCE"
)


def test_the_documented_line_names_device_core_serial_number_and_action() -> None:
    fault = kernel_fault(f"[ 1234.5] {DOCUMENTED}")
    assert fault is not None
    assert (fault.signature, fault.summary) == (
        "neuron_sram_uncorrectable",
        "the kernel log reports SRAM_UNCORRECTABLE_ERROR on neuron 0",
    )
    assert (
        fault.evidence.items()
        >= {
            "hard": True,
            "nd_id": "0",
            "nc_id": "0",
            "serial_num": "19fcda00f5ff6eb9",
            "action": "TERMINATE_INSTANCE",
        }.items()
    )


@pytest.mark.parametrize(
    ("name", "signature", "hard"),
    [
        ("NC_UNCORRECTABLE_ERROR", Signature.NEURON_CORE_UNCORRECTABLE, True),
        ("HBM_UNCORRECTABLE_ERROR", Signature.NEURON_HBM_UNCORRECTABLE, True),
        ("HBM_REPAIRABLE_UNCORRECTABLE_ERROR", Signature.NEURON_HBM_REPAIRABLE, False),
        ("DMA_ERROR", Signature.NEURON_DMA_ERROR, True),
        ("HANG_ON_COLLECTIVES", Signature.NEURON_COLLECTIVES_HANG, True),
        ("SOMETHING_NEW", Signature.NEURON_HARDWARE_ERROR, False),
    ],
)
def test_every_name_has_a_signature(name: str, signature: Signature, hard: bool) -> None:
    fault = kernel_fault(f"kernel: NEURON_HW_ERR={name} affecting neuron devices")
    assert fault is not None
    assert (fault.signature, fault.evidence["hard"], is_hard(fault.signature)) == (signature, hard, hard)


@pytest.mark.parametrize("line", ["", "neuron 0000:cc:00.0: nd0: reset completed", "NEURON_HW_ERR=", "NEURON_HW_ERR"])
def test_other_lines_are_no_faults(line: str) -> None:
    assert kernel_fault(line) is None


@pytest.mark.parametrize(
    ("line", "signature"),
    [
        ("nrt_execute failed: status=1200 message=Stuck in collectives op", Signature.NEURON_COLLECTIVES_HANG),
        ("RuntimeError: NRT_EXEC_HW_ERR_HBM_UE (1201)", Signature.NEURON_HBM_UNCORRECTABLE),
        ("ERROR NRT:nrt_infer status 1202", Signature.NEURON_SRAM_UNCORRECTABLE),
        ("error code: 1203", Signature.NEURON_DMA_ERROR),
        ("NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE", Signature.NEURON_HBM_REPAIRABLE),
        ("nrt_execute() status: 1206", Signature.NEURON_NETWORK_PROXY),
        ("nrt_execute status=1004", Signature.NEURON_HARDWARE_ERROR),
        ("Failure: NRT_TIMEOUT in nrt_execute()", Signature.NEURON_HARDWARE_ERROR),
        ("Failure: NRT_EXEC_UNIT_UNRECOVERABLE in nrt_execute()", Signature.NEURON_HARDWARE_ERROR),
        ("Failure: NRT_HW_ERROR in nrt_execute()", Signature.NEURON_HARDWARE_ERROR),
    ],
)
def test_a_status_of_the_runtime_is_found_by_name_and_by_number(line: str, signature: Signature) -> None:
    (fault,) = runtime_faults(["loading weights", line, line])
    assert (fault.signature, fault.evidence["line"]) == (signature, line)


def test_numbers_that_are_no_status_and_statuses_that_are_no_hardware_are_no_faults() -> None:
    harmless = ["1201 tokens in 1.2 s", "port 1203", "status=1204", "status=5", "HTTP status 200", "x" * 10_000]
    assert runtime_faults(harmless) == ()


PRINTED = (Path(__file__).parent / "recorded" / "neuron-runtime.txt").read_text().splitlines()
MEANT = (
    Signature.NEURON_SRAM_UNCORRECTABLE,
    Signature.NEURON_HBM_UNCORRECTABLE,
    Signature.NEURON_HBM_REPAIRABLE,
    Signature.NEURON_DMA_ERROR,
    Signature.NEURON_DMA_ERROR,
    Signature.NEURON_COLLECTIVES_HANG,
    Signature.NEURON_COMPUTE_HANG,
)


@pytest.mark.parametrize(("line", "signature"), list(zip(PRINTED, MEANT, strict=True)))
def test_what_the_runtime_prints_says_more_than_the_timeout_that_comes_with_it(line: str, signature: Signature) -> None:
    (fault,) = runtime_faults(["ERROR  NRT:nrt_infodump  Failure: NRT_TIMEOUT in nrt_execute()", f"2026-Aug-01 {line}"])
    assert fault.signature == signature
    assert fault.evidence["line"].endswith(line)


def test_an_hbm_error_that_goes_on_in_further_lines_is_read_to_its_end() -> None:
    begins, told = PRINTED[2].split(" Please", 1)
    assert [fault.signature for fault in runtime_faults([begins, f"Please{told}"])] == ["neuron_hbm_repairable"]
    assert [fault.signature for fault in runtime_faults([begins])] == ["neuron_hbm_uncorrectable"]


def test_a_timeout_that_the_programs_own_notifications_cause_is_no_hang_of_the_hardware() -> None:
    of_dge = PRINTED[6].replace(", waiting", ", potentially caused by DGE notifications enabled, waiting")
    assert runtime_faults([of_dge]) == ()
    assert is_hard(Signature.NEURON_COMPUTE_HANG)


def test_a_status_and_its_text_are_one_fault() -> None:
    assert len(runtime_faults([PRINTED[0], "nrt_execute failed: status=1202"])) == 1
