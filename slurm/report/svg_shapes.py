"""The shapes of the report's charts as SVG: no text, so that they stretch to any width; few elements each.

Every shape is drawn in a box of 1000 by 100 that the page stretches (preserveAspectRatio="none"). Colours are
classes of the page's style.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 1000, 100
_LEVELS = 5  # of how busy a node is


def drawing(shapes: str, name: str) -> str:
    """An SVG element around shapes; ``name`` says what it shows to who cannot see it."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(name)}">{shapes}</svg>'
    )


def bar(share: float) -> str:
    """One bar from the left, over its track."""
    width = round(WIDTH * min(max(share, 0), 1), 1)
    return (
        f'<rect class="track" width="{WIDTH}" height="{HEIGHT}"/>'
        f'<rect class="fill" width="{width}" height="{HEIGHT}"/>'
    )


def columns(heights: Sequence[float], names: Sequence[str], values: Sequence[str]) -> str:
    """A column for each height, 0 to 1; what it stands for is shown where the pointer is."""
    step = WIDTH / max(1, len(heights))
    shapes = []
    for number, (height, name, value) in enumerate(zip(heights, names, values, strict=True)):
        tall = max(HEIGHT * height, 1.5) if height else 0  # so that one document of 10^9 is seen
        title = f"<title>{escape(name)}: {escape(value)}</title>"
        x, width = round(number * step + step * 0.06, 2), round(step * 0.88, 2)
        shapes.append(
            f'<g>{title}<rect class="none" x="{x}" width="{width}" height="{HEIGHT}"/>'
            f'<rect class="fill" x="{x}" y="{HEIGHT - tall:.2f}" width="{width}" height="{tall:.2f}"/></g>'
        )
    return "".join(shapes)


def area(heights: Sequence[float]) -> str:
    """Steps, filled down to the ground."""
    step = WIDTH / max(1, len(heights))
    path = [f"M0 {HEIGHT}"]
    for number, height in enumerate(heights):
        path.append(f"V{HEIGHT * (1 - height):.1f}H{(number + 1) * step:.1f}")
    return f'<path class="area" d="{"".join(path)}V{HEIGHT}Z"/>'


def ranges(steps: Sequence[tuple[float, float, float] | None]) -> str:
    """A box from the least to the most of each step, and a line at its median."""
    step = WIDTH / max(1, len(steps))
    boxes, lines = [], []
    for number, each in enumerate(steps):
        if each is None:
            continue
        least, median, most = (HEIGHT * (1 - value) for value in each)
        x, width = number * step + step * 0.1, step * 0.8
        boxes.append(f"M{x:.1f} {most:.1f}h{width:.1f}V{max(least, most + 0.8):.1f}h-{width:.1f}z")
        lines.append(f"M{x:.1f} {median:.1f}h{width:.1f}")
    return f'<path class="range" d="{"".join(boxes)}"/><path class="line" d="{"".join(lines)}"/>'


def busy_row(steps: Sequence[float]) -> str:
    """Boxes, darker where a value, 0 to 1, is larger; neighbours of one level are one box."""
    step = WIDTH / max(1, len(steps))
    levels = [-(-round(value * 1000) * _LEVELS // 1000) for value in steps]
    of_level: dict[int, list[str]] = {}
    begin = 0
    for number in range(1, len(levels) + 1):
        if number == len(levels) or levels[number] != levels[begin]:
            if level := min(levels[begin], _LEVELS):
                box = f"M{begin * step:.1f} 0H{number * step:.1f}V{HEIGHT}H{begin * step:.1f}z"
                of_level.setdefault(level, []).append(box)
            begin = number
    track = f'<rect class="track" width="{WIDTH}" height="{HEIGHT}"/>'
    return track + "".join(
        f'<path class="busy{level}" d="{"".join(boxes)}"/>' for level, boxes in of_level.items()
    )


def gap_lines(places: Sequence[float]) -> str:
    """Dashed lines at these places, 0 to 1."""
    path = "".join(f"M{WIDTH * place:.1f} 0V{HEIGHT}" for place in places)
    return f'<path class="gap" d="{path}"/>' if path else ""
