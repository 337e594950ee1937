"""What a loader continues with: the run of a state, or the run that its arguments describe.

The second one is the run *asked* for. If both are equal from the state's position on, the loader resumes the
state's run. Otherwise it raises an error or, with ``amend``, follows what is asked from the next border on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import NamedTuple

from loader.order.amendment import amended, last_amended, with_amended_mark
from loader.order.checks import check_batch
from loader.order.mixture import CYCLE_TICKS, Position, Run, Source, Stage, source_seed
from loader.order.order import sizes_of_order
from loader.order.state import (
    ORDER_SIZES,
    OtherRun,
    SavedState,
    Skips,
    damaged_state,
    is_same_run,
    read_state,
    skips_of,
)
from shardprep.errors import BrokenShard, OtherTokenizer, Refused, UnknownVersion, UsageError


class Resumed(NamedTuple):
    """What a loader continues with."""

    run: Run
    position: Position
    skips: Skips
    border: int | None = None  # the step at which an amendment begins, if this load has made one


def resume_run(
    asked: Run,
    state: Mapping[str, object],
    layout: Mapping[str, int],
    targets: str,
    *,
    current: Run,
    amend: bool,
) -> Resumed:
    """Resume a loader from a state, or raise an error that names how the state's run is not the one asked.

    A state of ``current``, the loader's run, is a position in it: it has been compared with ``asked`` before.
    """
    saved = read_state(state)
    _check_targets(saved, targets)
    _check_fingerprint(saved, asked)
    _check_data(saved, asked)
    is_new = not (saved.epoch or saved.step or saved.num_micro)
    has_other_ticks = saved.tick_samples != asked.tick_samples
    if amend and is_new and has_other_ticks and not _is_of(saved, current, asked, layout):
        return _restart_as_asked(saved, asked)
    run = _run_of(saved, asked, layout)
    position = _position_of(saved, run, layout)
    if is_same_run(run, current):
        return _resume_unchanged(saved, run, position, asked)
    asked_in_ticks = _in_ticks_of(run, asked)
    wanted = asked_in_ticks.in_order_of(run.sources)
    # The arguments may already describe an amendment that begins later: compare the steps from it on.
    amended_at = last_amended(run)
    since = max(position.step, amended_at)
    if run.stages_from(since) == wanted.stages_from(since):
        if amend and run.stages_from(amended_at) != wanted.stages_from(amended_at):
            # The arguments differ from the run's past alone. They count from this step on.
            run = with_amended_mark(run, position.step)
        return _resume_unchanged(saved, run, position, asked)
    if not amend or run.is_validation:
        raise _other_stages(run, wanted, position.step, since)
    if position.num_micro:
        found = f"amend=True with a state from within a step (num_micro {position.num_micro})"
        raise UsageError(found=found, expected="a state that was saved after the optimizer's step")
    if is_new:
        return _restart_as_asked(saved, asked)
    return _amend(saved, run, position, asked_in_ticks)


def _is_of(saved: SavedState, run: Run, asked: Run, layout: Mapping[str, int]) -> bool:
    """Return whether a state is one of a run."""
    return saved.tick_samples == run.tick_samples and is_same_run(_run_of(saved, asked, layout), run)


def _resume_unchanged(saved: SavedState, run: Run, position: Position, asked: Run) -> Resumed:
    """Go on with the state's run: what is asked is the same from here on. This is the usual case."""
    _check_sources(run, asked, position.step)
    return Resumed(run, position, skips_of(saved))


def _restart_as_asked(saved: SavedState, asked: Run) -> Resumed:
    """Begin what is asked at step 0: nothing was delivered, so even another L is possible."""
    return Resumed(asked, Position(), skips_of(saved), border=0)


def _amend(saved: SavedState, run: Run, position: Position, asked: Run) -> Resumed:
    """Follow the state's run up to the next border, and what is asked from there on."""
    run, border = amended(run, position.step, asked)
    _check_sources(run, asked, position.step)
    return Resumed(run, position, skips_of(saved), border)


def _other_stages(run: Run, asked: Run, step: int, since: int) -> OtherRun:
    """Return the error for stages that are not those asked for, from the step ``since`` on."""
    was = "; ".join(map(str, run.stages_from(since)))
    wanted = "; ".join(map(str, asked.stages_from(since)))
    remedy = None if run.is_validation else "amend=True"
    advice = f"{remedy} to change the run from the next border on, or " if remedy else ""
    found = f"the state of step {step} belongs to another run: {was}"
    expected = f"{wanted}; pass {advice}the arguments of that run"
    return OtherRun(found=found, expected=expected, remedy=remedy)


def run_as_saved(data: Run, state: Mapping[str, object], layout: Mapping[str, int], targets: str) -> Resumed:
    """Return the run of a state at the beginning of its step, if ``data`` has the samples that it reads.

    Stages and sizes of ``data`` do not count. Raises an error for other data or another order.
    """
    saved = read_state(state)
    _check_targets(saved, targets)
    _check_fingerprint(saved, data)
    _check_data(saved, data)
    run = _run_of(saved, data, layout)
    position = Position(_position_of(replace(saved, num_micro=0), run, layout).step)
    return _resume_unchanged(saved, run, position, data)


def _check_sources(run: Run, data: Run, step: int) -> None:
    """Raise OtherRun if a run needs other sources than those of ``data`` from a step on."""
    given = [source.name for source in data.sources]
    for stage in run.stages_from(step):
        for name in stage.weights.keys() - set(given):
            found = f"sources {given}, but the run has samples of {name} from step {stage.step} on"
            expected = f"{name} in input_shards as well, without a weight if you want to drop it"
            raise OtherRun(found=found, expected=expected)


def _check_targets(saved: SavedState, targets: str) -> None:
    """Raise OtherRun for other targets: labels that are one place off make a model learn to copy."""
    # The fingerprint tells them apart only where samples are one token longer with shifted targets.
    if saved.targets != targets:
        remedy = f'targets="{saved.targets}"'
        found = f'a loader with targets="{targets}", and a state of a run with {remedy}'
        advice = "or start without the state"
        raise OtherRun(found=found, expected=f"{remedy}, {advice}", remedy=remedy)


def _check_fingerprint(saved: SavedState, asked: Run) -> None:
    """Raise OtherRun, OtherTokenizer or UnknownVersion if the state's fingerprint is not the asked run's."""
    old = dict(saved.fingerprint)
    new = asked.fingerprint
    if not asked.is_mixture:  # it cannot get more sources, so its data is as fixed as its settings
        old["data"] = saved.sources[0].data
        new["data"] = asked.sources[0].data
    differing = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    if not differing:
        return
    found = "; ".join(_as_argument(name, old.get(name), saved.targets) for name in differing)
    wanted = "; ".join(_as_argument(name, new.get(name), saved.targets) for name in differing)
    error: type[Refused] = OtherTokenizer if differing == ["tokenizer"] else OtherRun
    if "order_version" in differing:
        error = UnknownVersion
    advice = "resume with the shardprep and the arguments of that run, or start without the state"
    raise error(found=f"the state belongs to another run: {found}", expected=wanted, advice=advice)


def _as_argument(name: str, value: object, targets: str) -> str:
    """Return a value of a fingerprint for a message. Lengths are those of the loader's arguments."""
    if name in ("seq_len", "max_length") and targets == "shifted" and isinstance(value, int) and value:
        value -= 1  # samples have a token more than their input_ids
    return f"{name} {value!r:.20}"


def _check_data(saved: SavedState, asked: Run) -> None:
    """Raise OtherRun if the data of a source is not the state's."""
    given = {source.name: source for source in asked.sources}
    for known in saved.sources:
        source = given.get(known.name)
        if source and (known.data, known.num_samples) != (source.data, source.order.num_samples):
            found = (
                f"the source {known.name} in the state has data {known.data}, {known.num_samples:,} samples"
            )
            remedy = f'{{"{known.name}": ..., "{known.name}_2": NEW}}'
            advice = f"Keep its folders and their order; add others as another source, {remedy}"
            expected = f"data {source.data}, {source.order.num_samples:,} samples. {advice}"
            expected += ", with weights for both and amend=True"
            raise OtherRun(found=found, expected=expected, remedy=remedy)


def _run_of(saved: SavedState, asked: Run, layout: Mapping[str, int]) -> Run:
    """Return the run of a state, divided into this loader's batches. Raises BrokenShard or OtherRun."""
    size = saved.tick_samples
    try:
        check_batch(size, asked.order.group, **layout)
    except UsageError as error:
        found = f"{error.found} in the state, whose order takes {size} samples at a time"
        samples_per_rank, rest = divmod(size, layout["world_size"])
        advice = f"use a number of ranks that divides {size}"
        if not rest:
            batch_size = gcd(samples_per_rank, layout["batch_size"])
            of_run = saved.stages[0].global_batch_size
            advice = f"pass the run's global_batch_size={of_run} and batch_size={batch_size}"
        raise OtherRun(found=found, expected=error.expected, advice=advice) from None
    sources = []
    stages = []
    weights: dict[str, float] = {}
    try:
        for number, known in enumerate(saved.sources):
            seed = source_seed(asked.seed, number) if asked.is_mixture else asked.seed
            sizes = {name: getattr(known, name) for name in ORDER_SIZES}
            order = replace(asked.order, tick_samples=size, seed=seed, **sizes)
            sources.append(Source(name=known.name, data=known.data, order=order, added_at=known.added_at))
        for step, global_batch_size, shares, is_amended in saved.stages:
            if shares is not None:
                weights = {
                    source.name: share / CYCLE_TICKS for source, share in zip(sources, shares, strict=False)
                }
            stage = Stage(step=step, global_batch_size=global_batch_size, weights=weights)
            stages.append(replace(stage, begins_round=shares is not None, is_amended=is_amended))
        num_batches = size // (layout["batch_size"] * layout["world_size"])
        return replace(asked, sources=tuple(sources), stages=tuple(stages), batches_per_tick=num_batches)
    except UsageError as error:  # impossible orders or sizes
        raise BrokenShard(f"the state is damaged: {error}") from None


def _position_of(saved: SavedState, run: Run, layout: Mapping[str, int]) -> Position:
    """Return the position of a state. Raises BrokenShard or UsageError if it does not fit the run."""
    if saved.num_micro and saved.layout != layout:
        found = f"a state from within a step (num_micro {saved.num_micro}) with {saved.layout}"
        expected = f"a state saved after the optimizer's step, or those sizes, not {dict(layout)}"
        raise UsageError(found=found, expected=expected)
    num_steps = run.steps_in(saved.epoch)
    if saved.step >= num_steps:
        raise damaged_state(f"step is {saved.step} of epoch {saved.epoch}", f"a step below {num_steps}")
    position = Position(run.first_step(saved.epoch) + saved.step, saved.num_micro)
    num_batches = run.batches_in_step(position.step)
    if saved.num_micro >= num_batches:
        raise UsageError(found=f"a state with num_micro {saved.num_micro}", expected=f"below {num_batches}")
    if saved.since > position.step:
        raise damaged_state(f"since is {saved.since}", f"at most {position.step}, its step")
    return position


def _in_ticks_of(run: Run, asked: Run) -> Run:
    """Return the run asked for in the ticks of a run. Raises OtherRun if sizes are not multiples of L."""
    size = run.tick_samples
    for stage in asked.stages:
        if stage.global_batch_size % size:
            found = f"global_batch_size={stage.global_batch_size} from step {stage.step} on"
            expected = f"a multiple of {size}, which the state's order takes at a time"
            raise OtherRun(found=found, expected=expected)
    sources = []
    for source in asked.sources:
        num_samples = source.order.num_samples
        sizes = sizes_of_order(num_samples, source.num_bytes, size, source.order.group)
        sources.append(replace(source, order=replace(source.order, **sizes)))
    return replace(asked, sources=tuple(sources))
