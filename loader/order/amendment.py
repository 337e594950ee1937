"""Amendments: a run that goes on with other weights, sources or global batch sizes from a border on.

A border is the first step at which no round is half done: all slots are then at the same place in each
source, so no sample is repeated or lost.
"""

from __future__ import annotations

from dataclasses import replace

from loader.order.mixture import Position, Run, source_seed


def amended(run: Run, step: int, asked: Run) -> tuple[Run, int]:
    """Return a run, continued by the one asked for from the next border on, and the step of that border.

    The border is the first step from ``step`` on at which every round that has begun is complete. An
    amendment that has not begun is replaced, and the sources that it added are removed. New sources are
    added in the order of ``asked``, which must have the run's L. ``step`` must be above 0.
    """
    tick = run.tick_of(Position(step))
    current = run.round_at(tick)
    has_begun = current.first < tick
    free_tick = current.end if has_begun else tick  # the first tick whose round has not begun
    border = step
    while run.tick_of(Position(border)) < free_tick:
        border += 1
    while True:
        result = _up_to(run, border, asked)
        # Other sizes can move the beginning of a step: smaller steps may still fit into an epoch. Earlier
        # steps must not move, and a round that has begun must not end at another tick.
        round_stays = not has_begun or result.round_at(tick)[:2] == current[:2]
        step_stays = result.tick_of(Position(step)) == tick
        if round_stays and step_stays and result.tick_of(Position(border)) >= free_tick:
            return result, border
        border += 1


def _up_to(run: Run, step: int, asked: Run) -> Run:
    """Return a run up to a step, followed by the one asked for."""
    sources = [source for source in run.sources if source.added_at < step]
    known = {source.name for source in sources}
    for source in asked.sources:
        if source.name not in known:
            order = replace(source.order, seed=source_seed(run.seed, len(sources)))
            sources.append(replace(source, order=order, added_at=step))
    stages = [stage for stage in run.stages if stage.step < step]
    before = run.stages_from(step - 1)[0]
    # The round before a change of shares ends at that step, so a new round must begin there.
    round_ended = any(stage.step == step and stage.begins_round for stage in run.stages)
    for stage in asked.in_order_of(sources).stages_from(step):
        is_border = stage.step == step
        begins_round = stage.weights != before.weights or (round_ended and is_border)
        # The border is kept even if nothing changes there, since later arguments count from it on.
        if is_border or begins_round or stage.global_batch_size != before.global_batch_size:
            stages.append(replace(stage, begins_round=begins_round, is_amended=is_border))
        before = stage
    return replace(run, sources=tuple(sources), stages=tuple(stages))


def last_amended(run: Run) -> int:
    """Return the step at which the last amendment begins, or 0 without one."""
    return max((stage.step for stage in run.stages if stage.is_amended), default=0)


def with_amended_mark(run: Run, step: int) -> Run:
    """Return a run with an amendment at a step that changes nothing."""
    before = [stage for stage in run.stages if stage.step <= step]
    later = [stage for stage in run.stages if stage.step > step]
    marked = replace(before[-1], is_amended=True)
    if marked.step == step:
        before.pop()
    else:
        marked = replace(marked, step=step, begins_round=False)
    return replace(run, stages=(*before, marked, *later))
