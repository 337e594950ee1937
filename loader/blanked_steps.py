"""``where --blanked``: the steps of a run that saw documents which are blanked by now.

``blank`` has found the documents of a list, and put BLANK where their ids stood, in the same places. So which
samples held them is read from the shards that were made again, whatever names the list had. The reader of
training then walks through the run, with marks of samples in place of their bytes: what decides which sample
comes when decides here, too. The price: 0.3 us of CPU for each sample so far, 0.6 us of a mixture; of samples
of like length, every idx is read.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from loader.chunks import Chunk, Ragged
from loader.order import Int64s
from loader.run import Position, Run, RunReader
from loader.samples import JoinedRows, Samples, Window
from loader.shards import ShardSet
from loader.token_loader import TokenLoader
from shardprep.console import Progress, counted, print_lines, say
from shardprep.errors import NotFound, UsageError
from shardprep.format.index import ShardSamples
from shardprep.format.names import BLANK, blank_id, ids_of_ranges
from shardprep.format.plan import need_plan


def print_steps(loader: TokenLoader, *, is_json: bool) -> int:
    """Print the steps before the loader's position that saw blanked documents, and return the exit code.

    Raises NotFound where no document is blanked, UsageError, and what reading raises.
    """
    run, num_steps = loader.run, loader.progress.delivered.step
    found = sorted(_steps(run, num_steps).items())
    if loader.progress.num_left:
        say("note: the loop left epochs by set_epoch; all steps of these count as seen")
    steps = [{"step": step, "epoch": run.epoch_of(step), "sources": of} for step, of in found]
    if is_json:
        print_lines(json.dumps({"num_steps": num_steps, "steps": steps}))
        return 0
    sums = sum((of for _, of in found), Counter[str]())
    print_lines(f"{len(found):,} of {counted(num_steps, 'step')} saw blanked documents")
    print_lines(*(f"  {name}: {counted(count, 'sample')} with some" for name, count in sums.items()))
    for step, of in found:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(of.items()))
        print_lines(f"step {step}, epoch {run.epoch_of(step)}: {counts}")
    return 0


def blanked_samples(shards: ShardSet) -> Int64s:
    """Return the stored samples that hold a part of a blanked document, ascending."""
    plans = {data.folder: need_plan(data.folder) for data in shards.datasets if data.has_blanks}
    made_again = {folder: {*ids_of_ranges(plan.options.blanked)} for folder, plan in plans.items()}
    found = [np.zeros(0, np.int64)]
    for number in range(shards.num_shards):
        data, row = shards.locate(number)
        shard_id = int(data.shard_ids[row])
        if shard_id not in made_again.get(data.folder, ()):
            continue
        records, num_tokens = [np.zeros(0, np.int64)], 0
        blanks = [BLANK, blank_id(data.spec.tokenizer.vocab_size)]  # of ids as JSON, and of binary ones
        with ShardSamples(data.folder, data.spec, shard_id) as shard:
            ends = np.cumsum(shard.records["num_tokens"])
            for ids in shard.pieces():
                places = num_tokens + np.flatnonzero(np.isin(ids, blanks))
                records.append(np.searchsorted(ends, places, side="right"))
                num_tokens += len(ids)
        first, end = shards.first_sample[number : number + 2].tolist()
        samples = np.unique(np.concatenate(records)) + first - shards.records_of(first, number)
        found.append(samples[(samples >= first) & (samples < end)])  # else of the other side of a split
    return np.concatenate(found)


class _MarkedSamples:
    """Samples whose chunks hold no ids, and as lengths ``mark`` for blanked documents, else 0."""

    row_tokens = 1

    def __init__(self, of: Samples, blanked: Int64s, mark: int) -> None:
        self._of, self._mark = of, mark
        self._begins, self._ends = blanked, blanked + 1
        self._width, self._size = 1, of.num_samples  # of a sample, and of all
        if isinstance(of, JoinedRows):
            # A document is a stretch of the stream of tokens that rows are cut from, which goes on with its
            # first token behind its end.
            self._width, self._size = of.row_tokens, of.offsets
            stretches = _tokens_of(of, blanked)
            self._begins, self._ends = (np.concatenate([each, each + self._size]) for each in stretches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def read(self, reader: object, samples: Int64s, offset: int) -> Window:  # noqa: ARG002 - nothing is read
        first = (offset + samples * self._width) % self._size
        end = first + self._width
        if getattr(self._of, "keeps_tail", False):  # the last row is not full
            end = np.minimum(end, self._size)
        is_marked = np.searchsorted(self._ends, first, "right") < np.searchsorted(self._begins, end, "left")
        lengths = is_marked.astype(np.int32) * np.int32(self._mark)

        def chunk_of(first: int, end: int) -> Chunk:
            here = lengths[:, first:end]
            return Chunk(lengths=here, ids=Ragged.of_joined(np.zeros(0, np.int32), np.zeros_like(here)))

        return chunk_of


def _tokens_of(samples: JoinedRows, documents: Int64s) -> tuple[Int64s, Int64s]:
    """Return where stored documents begin and end in the stream of all tokens."""
    begins, ends = np.zeros((2, len(documents)), np.int64)
    shards, reader = samples.shards, samples.open()
    shard_of = shards.shard_of(documents)
    for number in np.unique(shard_of).tolist():
        lengths, here = reader.num_tokens_of(number), shard_of == number
        begin, end = samples.first_token[number : number + 2].tolist()
        has_more = end - begin > int(lengths.sum())  # an EOS is put behind each document
        sums = begin + np.concatenate([[0], np.cumsum(lengths + has_more)])
        place = documents[here] - shards.first_sample[number]
        begins[here], ends[here] = sums[place], sums[place + 1]
    reader.close()
    return begins, ends


def _steps(run: Run, num_steps: int) -> dict[int, Counter[str]]:
    """Return the steps before ``num_steps`` that saw blanked documents: of each source, how many samples."""
    sources, num_blanked = [], 0
    for mark, source in enumerate(run.sources, 1):
        if source.samples is None:
            raise UsageError(found=f"no {source.name}, which the run had", expected=f"{source.name}=PATH")
        blanked = blanked_samples(source.samples.shards)
        num_blanked += len(blanked)
        marked: Any = _MarkedSamples(source.samples, blanked, mark)
        sources.append(replace(source, samples=marked))
    if not num_blanked:
        raise NotFound(found="no blanked document in the data", expected="data sets that 'blank' made")
    reader = RunReader(replace(run, sources=tuple(sources)), range(run.order.num_slots))
    found: dict[int, Counter[str]] = {}

    def first_tick(step: int) -> int:
        return run.tick_of(Position(step))

    end_tick = first_tick(num_steps)
    progress = Progress("looking through the order", end_tick, unit="ticks")
    for epoch in range(run.epoch_of(num_steps) + 1):
        at = epoch * run.ticks_per_epoch
        for chunk in reader.chunks(epoch, 0, 1 << 16, endless=False):
            if at >= end_tick:
                break
            for tick in np.flatnonzero(chunk.lengths.any(axis=0)).tolist():
                if at + tick < end_tick:
                    step = bisect_right(range(num_steps), at + tick, key=first_tick) - 1
                    marks = chunk.lengths[:, tick]
                    names = (run.sources[mark - 1].name for mark in marks[marks > 0].tolist())
                    found.setdefault(step, Counter()).update(names)
            at += chunk.num_ticks
            progress.add(chunk.num_ticks)
    reader.close()
    return found
