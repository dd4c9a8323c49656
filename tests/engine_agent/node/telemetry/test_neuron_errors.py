"""Lines of logs become faults that say which hardware, and whether it must be replaced."""

from pathlib import Path

import pytest

from engine_agent.node.telemetry.neuron_errors import kernel_fault, runtime_faults
from engine_agent.protocol.signatures import FaultSignature as Signature
from engine_agent.protocol.signatures import is_hard

DOCUMENTED = (
    "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0592464924bd45322 hostname=ip-172-31-61-252 nd-id=0 nc-id=0 "
    "serial-num=19fcda00f5ff6eb9 action=TERMINATE_INSTANCE"
)


def test_the_documented_line_names_device_core_serial_number_and_action() -> None:
    fault = kernel_fault(f"[ 1234.5] {DOCUMENTED}")
    assert fault is not None
    assert (fault.signature, fault.summary) == (
        "neuron_sram_uncorrectable",
        "the kernel log says SRAM_UNCORRECTABLE_ERROR on neuron 0",
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
