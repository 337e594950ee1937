"""The epochs of a run's sources over its steps, as a picture in SVG."""

from __future__ import annotations

import re
from html import escape

from loader.order.mixture import Position, Run
from shardprep.console import printable

PICTURE_BEGINS = re.compile(rb"<svg [^>]*shardprep-forecast")
_WIDTH = 640  # of the plot, as the height
_HEIGHT = 280
_LEFT = 60
_TOP = 24
_LINE = 20  # height of a line of the legend
_NUM_POINTS = 20  # of a line, beside those where stages begin: in between it is straight
_COLORS = ("#2f6fdb", "#c4423a", "#2e8b57", "#c99a2e", "#7a4fc0", "#1593a5", "#b0568c", "#6b7785")


def picture(run: Run, num_steps: int) -> str:
    """Return a line for each source, and a dashed one where a stage begins.

    Counts 20 steps, and those where stages begin: 0.2 s each if a tick has 30,000 slots.
    """
    begins = [stage.step for stage in run.stages[1:] if stage.step < num_steps]
    steps = sorted({*begins, *(round(number * num_steps / _NUM_POINTS) for number in range(_NUM_POINTS + 1))})
    epochs = [run.source_epochs(Position(step)) for step in steps]
    most = max(*epochs[-1].values(), 1e-9)

    def x(step: int) -> str:
        return f"{_LEFT + _WIDTH * step / num_steps:.1f}"

    def y(value: float) -> str:
        return f"{_TOP + _HEIGHT * (1 - value / most):.1f}"

    bottom = _TOP + _HEIGHT
    height = bottom + _LINE * (len(run.sources) + 2)
    box = f'viewBox="0 0 {_LEFT + _WIDTH + 40} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="shardprep-forecast" {box} font-size="13"'
    lines = [f'{head} font-family="sans-serif">', "<title>epochs of each source over steps</title>"]
    lines.append(f'<rect width="100%" height="100%" fill="#fff"/><text x="{_LEFT}" y="16">epochs</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = y(most * share)
        lines.append(f'<path d="M{_LEFT} {at}h{_WIDTH}" stroke="#dfe4ea"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{at}" text-anchor="end">{most * share:.3g}</text>')
        step = round(num_steps * share)
        lines.append(f'<text x="{x(step)}" y="{bottom + 18}" text-anchor="middle">{step:,}</text>')
    dashed = f'{_TOP}V{bottom}" stroke="#596676" stroke-dasharray="4"/>'
    lines += [f'<path d="M{x(step)} {dashed}' for step in begins]
    for number, source in enumerate(run.sources):
        color = _COLORS[number % len(_COLORS)]
        points = " ".join(f"{x(step)},{y(at[source.name])}" for step, at in zip(steps, epochs, strict=True))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        below = bottom + _LINE * (number + 2)
        lines.append(f'<rect x="{_LEFT}" y="{below - 10}" width="10" height="10" fill="{color}"/>')
        name = escape(printable(source.name))
        text = f"{name}: {epochs[-1][source.name]:.3f} epochs after {num_steps:,} steps"
        lines.append(f'<text x="{_LEFT + 16}" y="{below}">{text}</text>')
    return "\n".join([*lines, "</svg>", ""])
