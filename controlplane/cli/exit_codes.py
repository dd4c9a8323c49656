"""Exit statuses of the command, documented in docs/cli.md. Existing numbers never change their meaning."""

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    DIFFERS = 1
    """`diff` found differences; a confirmation was declined."""
    USAGE = 2
    NOT_ACCEPTED = 3
    """The server rejected a value, and its rules are printed."""
    NOT_FOUND = 4
    NOT_ALLOWED = 5
    """The token is missing, invalid or not allowed to do this."""
    CONFLICT = 6
    """It conflicts with the current state; a later retry may work."""
    SERVER_FAULT = 7
    UNREACHABLE = 8
    TIMED_OUT = 9
    NOT_ACHIEVED = 10
    """The watched object failed: a rollout that failed, was rolled back or pauses."""
    WAITS_FOR_APPROVAL = 11
    """Waits for two-person approval; nothing has been done."""
    INTERRUPTED = 130


BY_STATUS = {
    400: ExitCode.NOT_ACCEPTED,
    401: ExitCode.NOT_ALLOWED,
    403: ExitCode.NOT_ALLOWED,
    404: ExitCode.NOT_FOUND,
    409: ExitCode.CONFLICT,
    410: ExitCode.CONFLICT,
    412: ExitCode.CONFLICT,
    413: ExitCode.NOT_ACCEPTED,
    422: ExitCode.NOT_ACCEPTED,
    428: ExitCode.CONFLICT,
    429: ExitCode.UNREACHABLE,
}


def exit_code_of(status: int) -> ExitCode:
    return BY_STATUS.get(status, ExitCode.SERVER_FAULT if status >= 500 else ExitCode.NOT_ACCEPTED)
