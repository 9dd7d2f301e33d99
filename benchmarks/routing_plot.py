"""Panels of lines as an SVG, written by hand so that a plot needs no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

Line = Sequence[tuple[float, float]]

WIDTH, HEIGHT, GAP, LEFT, TOP, BOTTOM = 270, 230, 26, 56, 74, 48
STYLES = (("#999999", "2 3"), ("#e69f00", "7 3"), ("#0072b2", ""), ("#d55e00", "10 3 2 3"), ("#009e73", ""))
"""Colours that the colour-blind tell apart, and dashes for print; in the order of the lines."""


def draw(
    title: str, panels: Mapping[str, Mapping[str, Line]], *, x_label: str, y_label: str, y_max: float, y_step: float
) -> str:
    """An SVG document.

    Args:
        title: what the plot shows.
        panels: by their titles, lines by name, of points (x, y). All panels have the same lines and x values.
        x_label: what x is; drawn as percent.
        y_label: what y is, with its unit.
        y_max: end of the y axis. A line that goes above it ends there.
        y_step: between two marks of the y axis.
    """
    names = list(next(iter(panels.values())))
    places = sorted({x for lines in panels.values() for line in lines.values() for x, _ in line})
    width = LEFT + len(panels) * (WIDTH + GAP)
    height = TOP + HEIGHT + BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 20, title, "start", 'font-size="14" font-weight="bold"'),
        _text(14, TOP + HEIGHT / 2, y_label, "middle", f'transform="rotate(-90 14 {TOP + HEIGHT / 2})"'),
    ]
    for number, name in enumerate(names):
        x = LEFT + number * 158
        out += [_path([(x, 38), (x + 28, 38)], number), _text(x + 33, 42, name, "start")]
    for number, (panel, lines) in enumerate(panels.items()):
        left = LEFT + number * (WIDTH + GAP)
        out += _axes(left, panel, places, x_label, y_max, y_step, has_marks=number == 0)
        for style, name in enumerate(names):
            points = _cut(lines[name], y_max)
            out.append(_path([(_x(left, x, places), _y(y, y_max)) for x, y in points], style))
    return "\n".join([*out, "</svg>", ""])


def _axes(
    left: int, title: str, places: Sequence[float], x_label: str, y_max: float, y_step: float, *, has_marks: bool
) -> list[str]:
    foot = TOP + HEIGHT
    out = [_text(left + WIDTH / 2, TOP - 8, title, "middle", 'font-weight="bold"')]
    for mark in range(int(y_max / y_step) + 1):
        y = _y(mark * y_step, y_max)
        colour = "#333333" if mark == 0 else "#dddddd"
        out.append(f'<path d="M{left} {y:.1f}H{left + WIDTH}" stroke="{colour}" fill="none"/>')
        if has_marks:
            out.append(_text(left - 6, y + 4, f"{mark * y_step:g}", "end"))
    for place in places:
        out.append(_text(_x(left, place, places), foot + 17, f"{place * 100:.0f}%", "middle"))
    return [*out, _text(left + WIDTH / 2, foot + 37, x_label, "middle")]


def _cut(line: Line, y_max: float) -> list[tuple[float, float]]:
    """The line up to where it first crosses `y_max`."""
    kept: list[tuple[float, float]] = []
    for x, y in line:
        if y > y_max:
            if kept:
                before_x, before_y = kept[-1]
                kept.append((before_x + (x - before_x) * (y_max - before_y) / (y - before_y), y_max))
            break
        kept.append((x, y))
    return kept


def _x(left: int, x: float, places: Sequence[float]) -> float:
    return left + 12 + (WIDTH - 24) * (x - places[0]) / ((places[-1] - places[0]) or 1.0)


def _y(y: float, y_max: float) -> float:
    return TOP + HEIGHT * (1 - y / y_max)


def _path(points: Sequence[tuple[float, float]], style: int) -> str:
    colour, dashes = STYLES[style % len(STYLES)]
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return (
        f'<path d="M{steps}" stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dashes or "none"}" fill="none"/>'
    )


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222222" {more}>{escape(text)}</text>'
