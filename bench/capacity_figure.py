"""Draws cells over days as SVG: what the load took as a filled shape, a line for each policy."""

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1080, 420, 48, 12, 64
COLOURS = ("#888888", "#c2410c", "#7c3aed", "#0369a1", "#15803d", "#111111")


def figure_svg(days: Sequence[float], needed: Sequence[float], lines: Mapping[str, Sequence[float]]) -> str:
    """`needed` and each line have a value for each of `days`; all in cells."""
    most = max([*needed, *(value for line in lines.values() for value in line)], default=1.0) or 1.0

    def points(row: Sequence[float]) -> str:
        return " ".join(f"{_x(day, days):.1f},{_y(value, most):.1f}" for day, value in zip(days, row, strict=True))

    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share * most, most)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * most:.0f}</text>')
    shape = f"{_x(days[0], days):.1f},{_y(0, most):.1f} {points(needed)} {_x(days[-1], days):.1f},{_y(0, most):.1f}"
    parts.append(f'<polygon points="{shape}" fill="#e2e8f0"/>')
    for row, colour in zip(lines.values(), COLOURS, strict=False):
        parts.append(f'<polyline points="{points(row)}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
    for number, (name, colour) in enumerate(zip(["what the load takes", *lines], ("#e2e8f0", *COLOURS), strict=False)):
        x, y = LEFT + number % 4 * 250, HEIGHT - 30 + number // 4 * 18
        parts.append(f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{name}</text>')
    whole = [day for day in range(int(days[0]), int(days[-1]) + 1) if day >= days[0]]
    parts += [f'<text x="{_x(day, days):.1f}" y="{HEIGHT - BOTTOM + 16}">day {day}</text>' for day in whole]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(day: float, days: Sequence[float]) -> float:
    return LEFT + (day - days[0]) / max(days[-1] - days[0], 1e-9) * (WIDTH - LEFT - 8)


def _y(value: float, most: float) -> float:
    return TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM)
