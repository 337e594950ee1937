"""The flags of ``forecast``, and which of them go together."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.order.planned import WeightsIn
from loader.train.where import named_sources
from shardprep.errors import UsageError
from shardprep.option import option
from shardprep.option_flags import parse_size

# Titles above the flags in the help.
_RUN = "the run"
_FILE = "the run of a file"
_NODE = "a node"
# A flag, and those that have no effect beside it.
_REPLACES = {
    "state": (
        "weights", "weights_in", "global_batch_size", "batch_size", "seq_len", "max_length",
        "group_by_length", "seed", "like", "scale",
    ),
    "like": ("num_steps", "weights", "weights_in"),
}  # fmt: skip
# A flag, and the one without which it has no effect.
_NEEDS = {"weights_in": "weights", "scale": "like"}


@dataclass(frozen=True, kw_only=True)
class ForecastOptions:
    """The flags of ``forecast``. Raises UsageError for a wrong value."""

    input_shards: Sequence[str] = option(())
    num_steps: int = option(0, "training steps, from 0 (default: those of --like)", group=_RUN)
    weights: str | None = option(None, 'as JSON: {"web": 0.7, "code": 0.3}, or by step', group=_RUN)
    weights_in: WeightsIn = option("tokens", "unit of the weights", group=_RUN)
    global_batch_size: str | None = option(None, "samples of a step, or [[0, 256], [1000, 512]]", group=_RUN)
    batch_size: int = option(1, "samples of a rank's batch", group=_RUN)
    seq_len: int | None = option(None, "pack documents into rows of this many tokens", group=_RUN)
    max_length: int | None = option(None, "truncate documents to this many tokens", group=_RUN)
    group_by_length: int = option(0, "samples of similar length in a group", group=_RUN)
    seed: int = option(0, "seed of the shuffle (default: 0)", group=_RUN)
    world_size: int | None = option(
        None, "data-parallel ranks (default: those of --state, else 1)", group=_RUN
    )
    model_id: str | None = option(None, "model whose tokenizer made tars of other tools", group=_RUN)
    state: Path | None = option(None, "checkpoint, whose run is meant", group=_FILE)
    like: Path | None = option(None, "forecast --json of a run, to find a small run like it", group=_FILE)
    scale: float = option(0.1, "size of the small run, relative to --like", group=_FILE)
    num_workers: int = option(4, "reading processes of a rank", group=_NODE)
    ranks_per_node: int = option(8, "ranks of a node", group=_NODE)
    step_s: float = option(1.0, "seconds of a step, to show the reads of the first minute", group=_NODE)
    disk: str | None = option(None, "say whether a copy by stage fits this size, such as 2T", group=_NODE)
    picture: Path | None = option(None, "draw the epochs over steps into an SVG file", group="output")

    def __post_init__(self) -> None:
        names_sources = "weights" in named_sources([*self.input_shards])
        if self.num_steps < 1 and self.like is None:
            raise UsageError.of_value("--num_steps", self.num_steps, "at least 1, the steps to count")
        for name in ("world_size", "num_workers", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError.of_value(f"--{name}", value, "at least 1")
        if not 0 < self.step_s < math.inf:
            raise UsageError.of_value("--step_s", self.step_s, "seconds above 0")
        if not 0 < self.scale <= 1:
            raise UsageError.of_value("--scale", self.scale, "a number above 0, at most 1")
        if self.weights is not None and not names_sources:
            raise UsageError(found="--weights without named sources", expected="NAME=PATH for each")
        if names_sources and self.weights is None and self.state is None and self.like is None:
            expected = "the share of each; add --weights '{\"NAME\": 0.7, ...}'"
            raise UsageError(found="named sources without --weights", expected=expected)

    @property
    def disk_bytes(self) -> int | None:
        return None if self.disk is None else parse_size(self.disk, "--disk", such_as="960G or 2T")

    def of_run(self) -> dict[str, Any]:
        """Return the arguments of the loader that describe the run."""
        names = ("batch_size", "seq_len", "max_length", "group_by_length", "seed", "world_size")
        arguments = {name: getattr(self, name) for name in names}
        if self.world_size is None:  # the loader would look for a launcher's
            arguments["world_size"] = 1
        if self.global_batch_size is not None:
            arguments["global_batch_size"] = _from_json("--global_batch_size", self.global_batch_size)
        if self.weights is not None:
            arguments["weights"] = _from_json("--weights", self.weights)
            arguments["weights_in"] = self.weights_in
        return arguments


def _from_json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError.of_value(flag, text, f"JSON ({error})") from None


def refuse_without_effect(given: Container[str]) -> None:
    """Raise UsageError if some of the flags that a user gave would have no effect beside others."""
    for flag, replaced in _REPLACES.items():
        idle = ", ".join(f"--{name}" for name in replaced if name in given)
        if flag in given and idle:
            expected = f"one or the other, since --{flag} decides that"
            raise UsageError(found=f"{idle} with --{flag}", expected=expected, advice=f"leave out {idle}")
    for flag, needed in _NEEDS.items():
        if flag in given and needed not in given:
            advice = f"add --{needed}, or leave out --{flag}"
            raise UsageError(found=f"--{flag} without --{needed}", expected="both", advice=advice)
