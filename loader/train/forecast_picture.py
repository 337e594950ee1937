"""The epochs of a run's sources over its steps, as a picture in SVG."""

from __future__ import annotations

import re
from html import escape

from loader.order.forecast import RunForecast
from shardprep.console import printable

PICTURE_BEGINS = re.compile(rb"<svg [^>]*shardprep-forecast")
_WIDTH = 640  # of the plot, as the height
_HEIGHT = 280
_LEFT = 60
_TOP = 24
_LINE = 20  # height of a line of the legend
_COLORS = ("#2f6fdb", "#c4423a", "#2e8b57", "#c99a2e", "#7a4fc0", "#1593a5", "#b0568c", "#6b7785")


def picture(run: RunForecast) -> str:
    """Return a line for each source, straight within a stage, and a dashed one where a stage begins."""
    most = max(*(source.epochs for source in run.sources), 1e-9)
    bottom = _TOP + _HEIGHT
    box = f'viewBox="0 0 {_LEFT + _WIDTH + 40} {bottom + _LINE * (len(run.sources) + 2)}"'
    head = '<svg xmlns="http://www.w3.org/2000/svg" class="shardprep-forecast" font-size="13"'
    lines = [f'{head} font-family="sans-serif" {box}>', "<title>epochs of each source over steps</title>"]
    lines.append(f'<rect width="100%" height="100%" fill="#fff"/><text x="{_LEFT}" y="16">epochs</text>')
    for share in (0.0, 0.5, 1.0):
        x = _LEFT + _WIDTH * share
        y = bottom - _HEIGHT * share
        lines.append(f'<path d="M{_LEFT} {y}h{_WIDTH}" stroke="#dfe4ea"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{most * share:.3g}</text>')
        step = f"{round(run.num_steps * share):,}"
        lines.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    xs = [_LEFT + _WIDTH * stage.step / run.num_steps for stage in run.stages]
    dashed = f'{_TOP}V{bottom}" stroke="#596676" stroke-dasharray="4"/>'
    lines += [f'<path d="M{x:.1f} {dashed}' for x in xs[1:]]
    for number, source in enumerate(run.sources):
        color = _COLORS[number % len(_COLORS)]
        epochs = [*(stage.epochs[source.name] for stage in run.stages), source.epochs]
        at = zip([*xs, _LEFT + _WIDTH], epochs, strict=True)
        points = " ".join(f"{x:.1f},{bottom - _HEIGHT * value / most:.1f}" for x, value in at)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        y = bottom + _LINE * (number + 2)
        text = f"{escape(printable(source.name))}: {source.epochs:.3f} epochs after {run.num_steps:,} steps"
        lines.append(f'<text x="{_LEFT}" y="{y}" fill="{color}">{text}</text>')
    return "\n".join([*lines, "</svg>", ""])
