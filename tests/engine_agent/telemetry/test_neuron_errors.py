"""Lines of logs become faults that say which hardware, and whether it must be replaced."""

import pytest

from engine_agent.protocol.signatures import FaultSignature as Signature
from engine_agent.protocol.signatures import is_hard
from engine_agent.telemetry.neuron_errors import kernel_fault, runtime_faults

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
    ],
)
def test_a_status_of_the_runtime_is_found_by_name_and_by_number(line: str, signature: Signature) -> None:
    (fault,) = runtime_faults(["loading weights", line, line])
    assert (fault.signature, fault.evidence["line"]) == (signature, line)


def test_numbers_that_are_no_status_and_statuses_that_are_no_hardware_are_no_faults() -> None:
    assert runtime_faults(["1201 tokens in 1.2 s", "port 1203", "status=1204", "HTTP status 200", "x" * 10_000]) == ()
