"""Durations as people read them, on pages, in notices, reasons and incidents. Pure."""

UNITS_S = (("d", 86_400), ("h", 3_600), ("min", 60))


def age_text(age_s: float, space: str = " ") -> str:
    """Formats a duration in the largest unit with at least two: `90 s`, `12 min`, `30 h`, `5 d`. Negative ones are `0
    s`.

    `space` stands before the unit. static/dashboard/ages.js does the same in the browser."""
    whole_s = max(0, int(age_s))
    for unit, length_s in UNITS_S:
        if whole_s >= 2 * length_s:
            return f"{whole_s // length_s}{space}{unit}"
    return f"{whole_s}{space}s"
