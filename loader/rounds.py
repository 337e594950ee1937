"""Reads the ticks of a run for some slots: each source by windows of its own, several laid out in rounds."""

from __future__ import annotations

from collections.abc import Iterator
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
        """Yield the ticks of an epoch from one on, and those of later epochs if it is endless. Chunks have
        up to ``chunk_ticks``; they end where a window, a round or an epoch ends."""
        run = self._run
        laid_out: LaidOutRound | None = None
        for number in count(epoch) if endless else (epoch,):
            first_tick = number * run.ticks_per_epoch
            at = first_tick + (tick if number == epoch else 0)
            end = first_tick + run.ticks_in(number)  # behind it ticks may be left that no step fits into
            while at < end:
                only = run.only_source_at(at)
                if only is not None:
                    source, source_tick, stage_end = only
                    most = min(chunk_ticks, (end if stage_end is None else min(stage_end, end)) - at)
                    chunk = self._sources[source].chunk(source_tick, most)
                    at += chunk.num_ticks
                    yield chunk
                    del chunk  # it may hold its window; the next one is read now
                    continue
                if laid_out is None or not laid_out.first <= at < laid_out.end:
                    laid_out = None  # likewise
                    laid_out = self._lay_out(run.round_at(at))
                first, at = at, min(at + chunk_ticks, laid_out.end, end)
                yield laid_out.chunk(first, at)

    def _lay_out(self, of_round: Round) -> LaidOutRound:
        """Read a round: each slot takes the next ticks of a source where its pattern has that source."""
        pattern = np.repeat(self._run.pattern(of_round, self._slots), self._run.order.group, axis=0)
        laid_out = LaidOutRound(of_round, len(pattern), self._run.row_tokens)
        rows = np.arange(len(pattern))[:, None]
        for number in np.unique(of_round.sources).tolist():
            columns = np.nonzero(pattern == number)[1].reshape(len(pattern), -1)  # of each row, ascending
            done, num_ticks = 0, columns.shape[1]
            while done < num_ticks:
                tick = int(of_round.taken[number]) + done
                chunk = self._sources[number].chunk(tick, num_ticks - done)
                end = done + chunk.num_ticks
                laid_out.put((rows, columns[:, done:end]), chunk, stays=end == num_ticks)
                done = end
                del chunk
        return laid_out


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
            self._window = self._read_window(epoch, tick)
            _, first, end = self._place
        stop = min(tick + most, end)
        chunk = self._window(tick - first, stop - first)
        if stop == end:
            self._window = None  # before the next one is read: half the memory
        if chunk.origins is not None:
            chunk.origins.flats[0][ORIGIN.index("source") :: len(ORIGIN)] = self._number
        return chunk

    def _read_window(self, epoch: int, tick: int) -> Window:
        """Read a whole window at once: a part of it would be many small reads."""
        self._window = None
        samples, order = self._source.samples, self._source.order
        assert samples is not None, "a loader is refused a run whose sources it lacks"
        if self._reader is None:
            self._reader = samples.open()
        first, end = next(order.windows(tick))
        self._place = epoch, first, end
        num_tokens = partial(samples.num_tokens, self._reader)
        numbers = order.samples_of(epoch, self._slots, first, end, num_tokens)
        return samples.read(self._reader, numbers, order.offset(epoch, samples.offsets))


class LaidOutRound:
    """The samples of a round, where they lie: in windows and chunks of their sources."""

    def __init__(self, of_round: Round, num_rows: int, row_tokens: int) -> None:
        self.first, self.end = of_round.first, of_round.end
        self._row_tokens = row_tokens
        self._num_cut = 0
        shape = (num_rows, of_round.end - of_round.first)
        self._lengths = np.empty(shape, np.int32)  # [samples per tick, ticks]
        self._ids = Ragged.empty(shape, row_tokens)
        self._starts, self._origins = Ragged.empty(shape), Ragged.empty(shape)

    def put(self, places: Any, chunk: Chunk, *, stays: bool) -> None:
        """Lay the samples of a source's chunk to these places of the round. ``stays``: the memory of its
        window does, until the round has been delivered."""
        self._num_cut += chunk.num_cut
        self._lengths[places] = chunk.lengths
        self._ids.put(places, chunk.ids if stays else chunk.ids.joined())
        if chunk.starts is not None:
            self._starts.put(places, chunk.starts)
        if chunk.origins is not None:
            self._origins.put(places, chunk.origins)

    def chunk(self, first: int, end: int) -> Chunk:
        """Return some ticks of the round, by their numbers in the run."""
        first, end = first - self.first, end - self.first
        num_cut, self._num_cut = self._num_cut, 0
        # Documents are joined chunk by chunk, which costs less than tick by tick.
        ids = self._ids.ticks(first, end)
        return Chunk(
            lengths=self._lengths[:, first:end],
            ids=ids if self._row_tokens else ids.joined(),
            row_tokens=self._row_tokens,
            num_cut=num_cut,
            starts=self._starts.ticks(first, end) if self._starts.flats else None,
            origins=self._origins.ticks(first, end) if self._origins.flats else None,
        )
