"""When and where shards were made: speed over time, time per shard, and which node was busy when.

Everything is told in at most 120 steps of time and 40 nodes, however many shards there are. Long times in
which no shard was made, as between a job array and its retry, are left out of the axis.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.format.shard_making import ShardMaking
from slurm.status_report import slow_shards

NUM_STEPS = 120
MOST_NODES = 40
_LEAST_GAP_S = 60.0
_GAP_SHARE = 0.05  # of the time in which shards were made: a longer gap is left out

Floats = npt.NDArray[np.float64]


class TimeAxis:
    """Maps seconds since 1970 to seconds of work, in which long gaps have no length."""

    def __init__(self, began: Floats, ended: Floats) -> None:
        order = np.argsort(began, kind="stable")
        starts, ends = began[order], np.maximum.accumulate(ended[order])
        pauses = starts[1:] - ends[:-1]
        worked_s = ends[-1] - starts[0] - pauses[pauses > 0].sum()
        is_gap = pauses > max(_LEAST_GAP_S, _GAP_SHARE * float(worked_s))
        firsts = np.concatenate([starts[:1], starts[1:][is_gap]])
        lasts = np.concatenate([ends[:-1][is_gap], ends[-1:]])
        edges = np.concatenate([[0.0], np.cumsum(lasts - firsts)])
        self._times = np.stack([firsts, lasts], axis=1).ravel()
        self._worked = np.stack([edges[:-1], edges[1:]], axis=1).ravel()
        self.length_s = max(float(edges[-1]), 1e-3)
        self.gaps = [
            {"at": round(float(at) / self.length_s, 5), "left_out_s": round(float(left_out), 1)}
            for at, left_out in zip(edges[1:-1], pauses[is_gap], strict=True)
        ]

    def place(self, times: Floats) -> Floats:
        """Seconds of work before each time: float64 of the same shape."""
        return np.interp(times, self._times, self._worked)

    def time_at(self, share: float) -> float:
        """The time, in seconds since 1970, at a share of the axis; behind a gap rather than before it."""
        worked = share * self.length_s
        number = int(np.searchsorted(self._worked[2::2], worked, side="right")) * 2
        return float(self._times[number] + worked - self._worked[number])


def work_times(made: Sequence[ShardMaking]) -> dict[str, Any]:
    """Speed, time per shard and the nodes, as plain data; empty where no shard was made."""
    if not made:
        return {}
    began = np.array([each.began for each in made], np.float64)
    ended = np.array([each.ended for each in made], np.float64)
    axis = TimeAxis(began, ended)
    starts, ends = axis.place(began), axis.place(ended)
    step_s = axis.length_s / NUM_STEPS
    wall_s = np.array([each.wall_s for each in made], np.float64)
    num_tokens = sum(each.num_tokens for each in made)
    tokens_per_s = np.array([each.num_tokens for each in made]) / np.maximum(wall_s, 1e-3)
    first_steps = np.minimum((starts / step_s).astype(np.int64), NUM_STEPS - 1)
    return {
        "began": round(float(began.min()), 3),
        "ended": round(float(ended.max()), 3),
        "worked_s": round(axis.length_s, 3),
        "tokens_per_s": round(num_tokens / axis.length_s),
        "bytes_per_s": round(sum(each.input_bytes for each in made) / axis.length_s),
        "shard_s": spread(wall_s.tolist()),
        "gaps": axis.gaps,
        "ticks": [{"at": at, "time": round(axis.time_at(at))} for at in (0, 0.25, 0.5, 0.75, 1)],
        "step_s": round(step_s, 6),
        "steps": _steps(starts, ends, tokens_per_s, wall_s, first_steps, step_s),
        "num_nodes": len({each.node for each in made}),
        "nodes": _nodes(made, starts, ends, step_s),
        "slow_shards": [
            {"shard": each.shard_id, "node": each.node, "wall_s": each.wall_s} for each in slow_shards(made)
        ],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """The least, the median and the most of some numbers."""
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def _steps(
    starts: Floats,
    ends: Floats,
    tokens_per_s: Floats,
    wall_s: Floats,
    first_steps: npt.NDArray[np.int64],
    step_s: float,
) -> list[dict[str, Any]]:
    """Of each step: tokens per second, shards in the making, and how long those took that began in it."""
    steps = []
    for number in range(NUM_STEPS):
        shares = _shares(starts, ends, number, step_s)
        own = wall_s[first_steps == number].tolist()
        steps.append(
            {
                "tokens_per_s": round(float(shares @ tokens_per_s)),
                "num_shards": round(float(shares.sum()), 2),
                "shard_s": spread(own) if own else None,
            }
        )
    return steps


def _shares(starts: Floats, ends: Floats, number: int, step_s: float) -> Floats:
    """The part of one step in which each shard was in the making, 0 to 1: float64[num_shards]."""
    low, high = number * step_s, (number + 1) * step_s
    return np.maximum(np.minimum(ends, high) - np.maximum(starts, low), 0) / step_s


def _nodes(made: Sequence[ShardMaking], starts: Floats, ends: Floats, step_s: float) -> list[dict[str, Any]]:
    """How busy each node was: all by name, or where they are too many the slowest."""
    of_node: dict[str, list[int]] = {}
    for number, each in enumerate(made):
        of_node.setdefault(each.node, []).append(number)
    speeds = {
        node: statistics.median(made[number].bytes_per_s for number in numbers)
        for node, numbers in of_node.items()
    }
    by_speed = sorted(of_node, key=lambda node: (speeds[node], node))
    shown = by_speed[:MOST_NODES] if len(by_speed) > MOST_NODES else sorted(of_node)
    nodes = []
    for node in shown:
        own = np.array(of_node[node])
        busy = [float(_shares(starts[own], ends[own], n, step_s).sum()) for n in range(NUM_STEPS)]
        nodes.append(
            {
                "node": node,
                "num_shards": len(own),
                "num_tokens": sum(made[number].num_tokens for number in own),
                "bytes_per_s": round(speeds[node]),
                "busy": [round(value, 2) for value in busy],
            }
        )
    return nodes
