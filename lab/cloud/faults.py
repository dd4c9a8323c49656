"""Faults that a test asks for: before a call, or after it was carried out; a code, a delay, a connection that ends."""

from dataclasses import dataclass
from enum import StrEnum

from lab.cloud.wire import Call


class When(StrEnum):
    """`AFTER`: the call was carried out, and its answer is lost."""

    BEFORE = "before"
    AFTER = "after"


class Ending(StrEnum):
    """What the client gets instead of an answer."""

    RESET = "reset"
    CUT = "cut"


@dataclass
class Fault:
    """`code`: of the error; `delay_s`: real seconds before all else; `ending`: no error, and no whole answer; `times`:
    how often yet; `region`: empty for all."""

    operation: str
    code: str = ""
    when: When = When.BEFORE
    times: int = 1
    delay_s: float = 0.0
    ending: Ending | None = None
    region: str = ""
    message: str = "Injected by the test."


def next_fault(faults: list[Fault], call: Call, when: When) -> Fault | None:
    """The first that fits, with one time less; those that are spent are forgotten."""
    for fault in faults:
        fits = (fault.operation, fault.when) == (call.operation, when) and fault.region in ("", call.region)
        if fits and fault.times > 0:
            fault.times -= 1
            if not fault.times:
                faults.remove(fault)
            return fault
    return None
