"""How long to wait before a process that died is started again. Pure arithmetic."""

FIRST_S = 0.5
LONGEST_S = 10.0
STEADY_AFTER_S = 30.0
"""A process that ran this long counts as recovered: its next death starts the backoff anew."""


def deaths_in_a_row(previous: int, ran_s: float) -> int:
    """Quick deaths in a row, this one included, after a run of `ran_s` seconds."""
    return 1 if ran_s >= STEADY_AFTER_S else previous + 1


def wait_before_restart_s(deaths: int) -> float:
    """Seconds to wait after the `deaths`-th quick death in a row (1, 2, …): doubles from 0.5 up to 10."""
    return min(LONGEST_S, FIRST_S * 2.0 ** min(deaths - 1, 16))
