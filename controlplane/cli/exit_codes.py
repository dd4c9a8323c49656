"""What the command's exit status says to programs. Documented in docs/cli.md; numbers never change their meaning."""

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    DIFFERS = 1
    """`diff` found differences; a question was answered with no."""
    USAGE = 2
    NOT_ACCEPTED = 3
    """The server refused a value: its rules are printed."""
    NOT_FOUND = 4
    NOT_ALLOWED = 5
    """No valid token, or one that may not do this."""
    CONFLICT = 6
    """It does not fit the present state; asking again later may work."""
    SERVER_FAULT = 7
    UNREACHABLE = 8
    TIMED_OUT = 9
    NOT_ACHIEVED = 10
    """What was watched ended otherwise than it should: a rollout that failed, was rolled back or pauses."""
    WAITS_FOR_APPROVAL = 11
    """Needs two-person approval; nothing was done yet."""
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
    """Returns the exit code for an HTTP error status."""
    return BY_STATUS.get(status, ExitCode.SERVER_FAULT if status >= 500 else ExitCode.NOT_ACCEPTED)
