"""Reads the chunks of a run, for some of its slots.

A ``run_tick`` is counted through all epochs of the run, an ``epoch_tick`` from the beginning of an epoch (of
the run, or of a source), and a ``source_tick`` through all epochs of one source. The ticks of a chunk, of a
window and of a round are also counted from their first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np

from loader.order.mixture import Round, Run, Source
from loader.read.chunks import ORIGIN, Chunk, Ragged, Window
from loader.read.reading import ShardReader
from loader.read.samples import Samples


class RunReader:
    """Reads the ticks of a run for some of its slots. Shards stay open until ``close``."""

    def __init__(self, run: Run, samples: Mapping[str, Samples], slots: range) -> None:
        self._run = run
        self._slots = slots
        # By number. The run has dropped a source without samples: resume_run refuses one that is still read.
        self._sources: dict[int, _SourceReader] = {}
        for number, source in enumerate(run.sources):
            if source.name in samples:
                self._sources[number] = _SourceReader(source, samples[source.name], number, slots)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    def chunks(
        self, first_epoch: int, epoch_tick: int, chunk_ticks: int, *, endless: bool
    ) -> Iterator[Chunk]:
        """Yield the ticks of an epoch from ``epoch_tick`` on, and those of later epochs if ``endless``.

        A chunk has up to ``chunk_ticks`` ticks, and ends where a window, a round or an epoch ends.
        """
        run = self._run
        round_: Round | None = None
        laid_out: Chunk | None = None  # the ticks of that round
        epochs = count(first_epoch) if endless else (first_epoch,)
        for epoch in epochs:
            run_tick = epoch * run.ticks_per_epoch
            end = run_tick + run.ticks_in(epoch)  # the ticks after it are not used
            if epoch == first_epoch:
                run_tick += epoch_tick
            while run_tick < end:
                only = run.only_source_at(run_tick)
                if only is not None:
                    source, source_tick, stage_end = only
                    most = min(run_tick + chunk_ticks, stage_end, end) - run_tick
                    chunk = self._sources[source].chunk(source_tick, most)
                    run_tick += chunk.num_ticks
                    yield chunk
                    del chunk  # it may keep its window in memory while the next one is read
                    continue
                if laid_out is None or round_ is None or not round_.first <= run_tick < round_.end:
                    laid_out = None  # frees the last round before reading
                    round_ = run.round_at(run_tick)
                    laid_out = self._lay_out(round_)
                first = run_tick
                run_tick = min(run_tick + chunk_ticks, round_.end, end)
                ticks = slice(first - round_.first, run_tick - round_.first)
                ids = laid_out.ids.ticks(ticks)
                documents = laid_out.documents
                yield replace(
                    laid_out,
                    lengths=laid_out.lengths[:, ticks],
                    # Joining documents here costs less than tick by tick.
                    ids=ids if run.row_tokens else ids.joined(),
                    documents=documents and documents.ticks(ticks),
                )
                laid_out = replace(laid_out, num_cut_tokens=0)  # the round's first chunk has reported them

    def _lay_out(self, round_: Round) -> Chunk:
        """Read a round: each slot takes a source's next samples at the ticks of the source in its pattern."""
        run = self._run
        # pattern: the source of each sample, int64[samples of the slots, ticks of the round]
        pattern = np.repeat(run.pattern(round_, self._slots), run.order.group, axis=0)
        lengths = np.empty(pattern.shape, np.int32)
        num_cut_tokens = 0
        has_origins = False
        ids = Ragged.empty(pattern.shape, run.row_tokens)
        documents = Ragged.empty(pattern.shape)
        samples = np.arange(len(pattern))[:, None]
        for number in np.unique(round_.sources).tolist():
            # columns: the ticks of this source, ascending, int64[samples of the slots, ticks of the source]
            columns = np.nonzero(pattern == number)[1].reshape(len(pattern), -1)
            done = 0
            num_ticks = columns.shape[1]
            while done < num_ticks:
                source_tick = int(round_.taken[number]) + done
                chunk = self._sources[number].chunk(source_tick, num_ticks - done)
                places = (samples, columns[:, done : done + chunk.num_ticks])
                done += chunk.num_ticks
                num_cut_tokens += chunk.num_cut_tokens
                has_origins |= chunk.has_origins
                lengths[places] = chunk.lengths
                # The source's next window would overwrite what is not copied.
                chunk = chunk if done == num_ticks else chunk.joined()
                ids.put(places, chunk.ids)
                if chunk.documents is not None:
                    documents.put(places, chunk.documents)
                del chunk
        return Chunk(
            lengths=lengths,
            ids=ids,
            num_cut_tokens=num_cut_tokens,
            documents=documents if documents.flats else None,
            has_origins=has_origins,
        )


class _SourceReader:
    """Reads the ticks of one source, window by window."""

    def __init__(self, source: Source, samples: Samples, number: int, slots: range) -> None:
        self._order = source.order
        self._samples = samples
        self._number = number
        self._slots = slots
        # Each process has other slots, and opens other shards first: its reader is the one of its first slot
        # among one for each slot.
        self._reader = ShardReader(samples.shards, number=slots.start, num_readers=source.order.num_slots)
        self._window: Window | None = None
        self._window_ticks = (0, 0, 0)  # its epoch of the source, first tick of that epoch, and end

    def close(self) -> None:
        self._window = None
        self._reader.close()

    def chunk(self, source_tick: int, most: int) -> Chunk:
        """Return up to ``most`` ticks of the source, from one window."""
        epoch, epoch_tick = divmod(source_tick, self._order.ticks_per_epoch)
        window_epoch, first, end = self._window_ticks
        if self._window is None or epoch != window_epoch or not first <= epoch_tick < end:
            # Read a whole window at once: its parts would need many small reads.
            self._window = None
            samples = self._samples
            reader = self._reader
            first, end = next(self._order.windows(epoch_tick))
            self._window_ticks = (epoch, first, end)
            num_tokens = partial(samples.num_tokens, reader)
            # numbers: int64[samples of the slots, ticks of the window]
            numbers = self._order.samples_of(epoch, self._slots, first, end, num_tokens)
            offset = self._order.offset(epoch, samples.num_offsets)
            self._window = samples.read(reader, numbers, offset)
        stop = min(epoch_tick + most, end)
        chunk = self._window(epoch_tick - first, stop - first)
        if stop == end:
            self._window = None  # freed before the next one is read, which halves the memory
        if chunk.documents is not None and chunk.has_origins:
            chunk.documents.flats[0][:, ORIGIN.index("source")] = self._number
        return chunk
