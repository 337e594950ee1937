"""The state of a loader in a checkpoint: a position, and the run that led to it, as plain values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from loader.order.mixture import CYCLE_TICKS, Position, Run
from shardprep.errors import BrokenShard, Refused, UnknownVersion, UsageError
from shardprep.format.json_files import as_type

STATE_FORMAT = "shardprep-loader-state"
STATE_VERSION = 5
MAX_EPOCH = 2**31 - 1  # so that ticks, counted through all epochs, fit into an int64
MAX_STAGE_STEP = MAX_EPOCH  # at which a stage may begin
_Count = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
_Number = Annotated[int, Meta(ge=1, le=2**62)]
ORDER_SIZES = ("num_samples", "block_samples", "window_samples")  # fields of both Order and _SavedSource


class Skips(NamedTuple):
    """What ``set_epoch`` skipped or repeated. Steps are counted through all epochs."""

    num_steps: int = 0  # that were skipped, minus those that were repeated
    since: int = 0  # the step to which it moved last
    samples_before: Mapping[str, int] = {}  # that were delivered before it moved there, by source


class OtherRun(Refused):
    """A loader's state has other data or another order."""


class _SavedSource(NamedTuple):
    """A list in the state, with these values in this order."""

    name: str
    data: str  # fingerprint of its shards, 16 hex digits
    num_samples: _Number
    block_samples: _Number
    window_samples: _Number
    added_at: _Count  # step of all epochs
    num_delivered: Annotated[int, Meta(ge=0)]  # samples before ``since``


class _SavedStage(NamedTuple):
    """A list in the state, with these values in this order."""

    step: _Count  # of all epochs
    global_batch_size: _Number
    shares: list[_Count] | None  # ticks of each source in CYCLE_TICKS ticks; None: unchanged
    is_amended: bool


@dataclass(frozen=True)
class SavedState:
    """The values of a state, without its format and version."""

    epoch: _Count
    step: _Count  # steps before the position in its epoch; elsewhere steps count through all epochs
    num_micro: _Count  # batches of each rank before the position in its step
    num_left: int  # Skips.num_steps
    since: Annotated[int, Meta(ge=0)]  # Skips.since, a step of all epochs
    layout: dict[str, _Number]  # world_size and batch_size
    targets: str
    tick_samples: _Number  # L
    sources: Annotated[list[_SavedSource], Meta(min_length=1)]
    stages: Annotated[list[_SavedStage], Meta(min_length=1)]
    fingerprint: dict[str, object]  # Run.fingerprint


def state_of(
    run: Run, position: Position, layout: Mapping[str, int], skips: Skips, targets: str
) -> dict[str, Any]:
    """Return the state at a position. ``layout`` and ``targets`` are those of the batches.

    All states have the same keys, and no dicts in lists, as torch.distributed.checkpoint requires.
    """
    epoch = run.epoch_of(position.step)
    sources = []
    for source, values in zip(run.sources, _source_values(run), strict=True):
        sources.append([*values, skips.samples_before.get(source.name, 0)])
    state = {
        "format": STATE_FORMAT,
        "version": STATE_VERSION,
        "epoch": epoch,
        "step": position.step - run.first_step(epoch),
        "num_micro": position.num_micro,
        "num_left": skips.num_steps,
        "since": skips.since,
        "layout": dict(layout),
        "targets": targets,
        "tick_samples": run.tick_samples,
        "sources": sources,
        "stages": _stage_values(run),
        "fingerprint": run.fingerprint,
    }
    return {**state, "checksum": checksum_of(state)}


def _source_values(run: Run) -> list[list[object]]:
    """Return the sources as lists of plain values, without the samples that were delivered."""
    sources = []
    for source in run.sources:
        sizes = [getattr(source.order, name) for name in ORDER_SIZES]
        sources.append([source.name, source.data, *sizes, source.added_at])
    return sources


def _stage_values(run: Run) -> list[list[object]]:
    stages: list[list[object]] = []
    for stage in run.stages:
        shares = list(run.shares(stage.weights)) if stage.begins_round else None
        stages.append([stage.step, stage.global_batch_size, shares, stage.is_amended])
    return stages


def is_same_run(one: Run, other: Run) -> bool:
    """Return whether two runs deliver the same samples, by the values of states, which round weights."""
    if (one.tick_samples, one.fingerprint) != (other.tick_samples, other.fingerprint):
        return False
    return _source_values(one) == _source_values(other) and _stage_values(one) == _stage_values(other)


def checksum_of(state: Mapping[str, object]) -> str:
    """Return the checksum of a state's values, 16 hex digits. Raises TypeError if they are not plain."""
    names = ["format", "version", *SavedState.__annotations__]
    known = {name: state[name] for name in names if name in state}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def skips_of(saved: SavedState) -> Skips:
    samples_before = {source.name: source.num_delivered for source in saved.sources}
    return Skips(saved.num_left, saved.since, samples_before)


def read_state(state: Mapping[str, object]) -> SavedState:
    """Check a state and return its values. Raises UsageError, BrokenShard or UnknownVersion."""
    if not isinstance(state, Mapping):
        found = f"the state is {state!r:.80}"
        remedy = "loader.load_state_dict(torch.load(PATH))"
        raise UsageError(found=found, expected="a dict that state_dict() returned", remedy=remedy)
    if state.get("format") != STATE_FORMAT:
        for name, value in state.items():
            if isinstance(value, Mapping) and value.get("format") == STATE_FORMAT:
                remedy = f"loader.load_state_dict(checkpoint[{name!r}])"
                found = f"a dict that has the state under {name!r}"
                raise BrokenShard(found=found, expected="the state itself", remedy=remedy)
        found = f"the state's format is {state.get('format')!r:.80}"
        remedy = "state_dict()"
        raise BrokenShard(found=found, expected=f"{STATE_FORMAT}, as {remedy} returns it", remedy=remedy)
    if state.get("version") != STATE_VERSION:
        found = f"the state has version {state.get('version')!r:.80}"
        advice = "resume with the shardprep that saved it, or start without the state"
        raise UnknownVersion(found=found, expected=STATE_VERSION, advice=advice)
    try:
        checksum = checksum_of(state)
    except (TypeError, ValueError, RecursionError):
        raise damaged_state("values are not plain numbers and texts", "the values of state_dict()") from None
    if state.get("checksum") != checksum:
        raise damaged_state("checksum does not fit its values", f"{checksum}, unless values were edited")
    known = {name: state[name] for name in SavedState.__annotations__ if name in state}
    try:
        saved = as_type(Path("state"), known, SavedState)
    except BrokenShard as error:
        raise damaged_state(error.found, error.expected) from None
    names = [source.name for source in saved.sources]
    added = [source.added_at for source in saved.sources]
    steps = [stage.step for stage in saved.stages]
    shares = [stage.shares for stage in saved.stages]
    is_consistent = (
        len(set(names)) == len(names)
        and added[0] == 0
        and added == sorted(added)
        and steps[0] == 0
        and steps == sorted(set(steps))
        and shares[0] is not None
        and all(each is None or (len(each) <= len(names) and sum(each) == CYCLE_TICKS) for each in shares)
        and not any(stage.global_batch_size % saved.tick_samples for stage in saved.stages)
    )
    if not is_consistent:
        raise damaged_state("sources and stages do not fit together", "sources and stages of one run")
    return saved


def damaged_state(found: object, expected: object) -> BrokenShard:
    wrong = f"the state is damaged: its {found}"
    return BrokenShard(found=wrong, expected=expected, advice="use another state")
