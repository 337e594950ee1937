"""Reads the ticks of a run for some slots. Each source has windows of its own; several share rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from loader.chunks import ORIGIN, Chunk, Ragged
from loader.run import Round, Run, Source
from loader.samples import Window


class RunReader:
    """The ticks of a run, in a process that reads some of the slots. It keeps shards open until ``close``."""

    def __init__(self, run: Run, slots: range) -> None:
        self._run, self._slots = run, slots
        # Each opens its files when the first window of it is read.
        self._sources = [SourceReader(source, number, slots) for number, source in enumerate(run.sources)]

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def chunks(self, epoch: int, tick: int, chunk_ticks: int, *, endless: bool) -> Iterator[Chunk]:
        """Yield the ticks of an epoch from one on, and of later epochs if it is endless.

        A chunk has up to ``chunk_ticks``, and ends where a window, a round or an epoch ends.
        """
        run = self._run
        of_round: Round | None = None
        laid_out: Chunk | None = None  # the ticks of that round
        for number in count(epoch) if endless else (epoch,):
            first_tick = number * run.ticks_per_epoch
            at = first_tick + (tick if number == epoch else 0)
            end = first_tick + run.ticks_in(number)  # behind it ticks may be left that no step fits into
            while at < end:
                only = run.only_source_at(at)
                if only is not None:
                    source, source_tick, stage_end = only
                    chunk = self._sources[source].chunk(
                        source_tick, min(at + chunk_ticks, stage_end, end) - at
                    )
                    at += chunk.num_ticks
                    yield chunk
                    del chunk  # it may hold its window; the next one is read now
                    continue
                if laid_out is None or of_round is None or not of_round.first <= at < of_round.end:
                    laid_out = None  # likewise
                    of_round = run.round_at(at)
                    laid_out = self._lay_out(of_round)
                first, at = at, min(at + chunk_ticks, of_round.end, end)
                yield _ticks_of(laid_out, first - of_round.first, at - of_round.first)
                laid_out = replace(laid_out, num_cut=0)  # the first chunk has counted them

    def _lay_out(self, of_round: Round) -> Chunk:
        """Read a round: each slot takes the next ticks of a source where its pattern has that source.

        Samples stay where they lie, in windows and chunks of their sources.
        """
        run = self._run
        pattern = np.repeat(run.pattern(of_round, self._slots), run.order.group, axis=0)
        lengths, num_cut = np.empty(pattern.shape, np.int32), 0
        ids = Ragged.empty(pattern.shape, run.row_tokens)
        starts, origins = Ragged.empty(pattern.shape), Ragged.empty(pattern.shape)
        rows = np.arange(len(pattern))[:, None]
        for number in np.unique(of_round.sources).tolist():
            columns = np.nonzero(pattern == number)[1].reshape(len(pattern), -1)  # of each row, ascending
            done, num_ticks = 0, columns.shape[1]
            while done < num_ticks:
                tick = int(of_round.taken[number]) + done
                chunk = self._sources[number].chunk(tick, num_ticks - done)
                places = (rows, columns[:, done : done + chunk.num_ticks])
                done += chunk.num_ticks
                num_cut += chunk.num_cut
                lengths[places] = chunk.lengths
                # The source's next window would overwrite what is not copied.
                ids.put(places, chunk.ids if done == num_ticks else chunk.ids.joined())
                if chunk.starts is not None:
                    starts.put(places, chunk.starts)
                if chunk.origins is not None:
                    origins.put(places, chunk.origins)
                del chunk
        return Chunk(
            lengths=lengths,
            ids=ids,
            row_tokens=run.row_tokens,
            num_cut=num_cut,
            starts=starts if starts.flats else None,
            origins=origins if origins.flats else None,
        )


def _ticks_of(laid_out: Chunk, first: int, end: int) -> Chunk:
    """Return some ticks of a round. Documents are joined here, which costs less than tick by tick."""
    ids, starts, origins = laid_out.ids.ticks(first, end), laid_out.starts, laid_out.origins
    return replace(
        laid_out,
        lengths=laid_out.lengths[:, first:end],
        ids=ids if laid_out.row_tokens else ids.joined(),
        starts=starts and starts.ticks(first, end),
        origins=origins and origins.ticks(first, end),
    )


class SourceReader:
    """The ticks of one source, window by window."""

    def __init__(self, source: Source, number: int, slots: range) -> None:
        self._source, self._number, self._slots = source, number, slots
        self._reader: Any = None
        self._window: Window | None = None
        self._place = (0, 0, 0)  # of the window: epoch, first tick and end

    def close(self) -> None:
        self._window = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def chunk(self, tick: int, most: int) -> Chunk:
        """Return the ticks of the source from one on, counted through its epochs: as many as ``most``, or as
        its window still has."""
        epoch, tick = divmod(tick, self._source.order.ticks_per_epoch)
        window_epoch, first, end = self._place
        if self._window is None or epoch != window_epoch or not first <= tick < end:
            # A whole window is read at once: a part of it would be many small reads.
            self._window = None
            samples, order = self._source.samples, self._source.order
            assert samples is not None, "a loader is refused a run whose sources it lacks"
            if self._reader is None:
                self._reader = samples.open()
            first, end = next(order.windows(tick))
            self._place = epoch, first, end
            num_tokens = partial(samples.num_tokens, self._reader)
            numbers = order.samples_of(epoch, self._slots, first, end, num_tokens)
            self._window = samples.read(self._reader, numbers, order.offset(epoch, samples.offsets))
        stop = min(tick + most, end)
        chunk = self._window(tick - first, stop - first)
        if stop == end:
            self._window = None  # before the next one is read: half the memory
        if chunk.origins is not None:
            chunk.origins.flats[0][ORIGIN.index("source") :: len(ORIGIN)] = self._number
        return chunk
