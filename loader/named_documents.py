"""``where --ids``: the steps of a run that saw documents of a list.

The reader of training walks through the run, with numbers of samples in place of their bytes. So what decides
which sample comes when (sources, stages, amendments, samples of like length, rows joined at load) decides
here, too. Read are the side files that names are looked up in, and the shards that hold a named document; of
samples of like length, every idx. The price: 0.3 us of CPU for each sample so far, 0.6 us of a mixture.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loader.chunks import Chunk, Ragged
from loader.decode import places_of
from loader.order import Int64s
from loader.run import Position, Run, RunReader
from loader.samples import JoinedRows, Samples, Window
from loader.shards import ShardSet
from loader.token_loader import TokenLoader
from shardprep.console import Progress, counted, print_lines, say
from shardprep.errors import BadInput, NotFound, UsageError
from shardprep.files import NOT_THERE, read_lines
from shardprep.format.documents import (
    DIGEST,
    DocumentNames,
    Pieces,
    kept_ids,
    keys_of_ids,
    keys_of_places,
    named_places,
    pieces_of,
    read_digests,
    read_names,
)
from shardprep.format.index import ShardSamples, read_idx
from shardprep.format.manifest import read_manifest
from shardprep.format.names import load_json
from shardprep.format.plan import Plan, need_plan

Place = tuple[int, int]  # number of the input, and byte or row in it: docs/format.md, "Places"
_CHUNK_TICKS = 1 << 16
# The first part in each sample, and behind the last one: of samples, and the token at which an epoch begins.
Bounds = Callable[[Int64s, int], tuple[Int64s, Int64s]]
_NONE = np.zeros(0, np.int64)


class Parts(NamedTuple):
    """Parts of documents, by the samples that they lie in: int64[parts] each."""

    sample: Int64s
    document: Int64s  # a number of its own


def print_steps(loader: TokenLoader, given: str, *, is_json: bool) -> int:
    """Print the steps before the loader's position that saw documents of a list; return the exit code.

    ``given``: the list, FILE, or NAME=FILE for one source. Raises NotFound where no source has a document of
    it, UsageError, and what reading raises.
    """
    run, num_steps = loader.run, loader.progress.delivered.step
    shard_sets = {}
    for source in run.sources:
        if source.samples is None:
            raise UsageError(found=f"no {source.name}, which the run had", expected=f"{source.name}=PATH")
        shard_sets[source.name] = source.samples.shards
    name, equals, path = given.partition("=")
    if equals and name in shard_sets and not Path(given).exists():
        named = find_documents(Path(path), {name: shard_sets[name]})
    else:
        named = find_documents(Path(given), shard_sets)
    if loader.progress.num_left:
        say("note: the loop left epochs by set_epoch; all steps of these count as seen")
    steps: list[dict[str, Any]] = []
    times = Counter[tuple[str, int]]()
    for step, documents in sorted(_steps(run, named, num_steps).items()):
        times.update(documents)
        counts = dict(sorted(Counter(name for name, _ in documents).items()))
        steps.append({"step": step, "epoch": run.epoch_of(step), "sources": counts})
    sources = {}
    for name, parts in named.items():
        of_source = [count for (of, _), count in times.items() if of == name]
        num_documents = len(np.unique(parts.document))
        sources[name] = {
            "num_documents": num_documents, "num_seen": len(of_source), "num_times": sum(of_source)
        }  # fmt: skip
    if is_json:
        print_lines(json.dumps({"num_steps": num_steps, "sources": sources, "steps": steps}))
        return 0
    print_lines(f"{len(steps):,} of {counted(num_steps, 'step')} saw documents of {given}")
    for name, of in sources.items():
        num_all = counted(of["num_documents"], "document")
        print_lines(f"  {name}: {of['num_seen']:,} of {num_all}, {of['num_times']:,} times")
    for each in steps:
        of_step = ", ".join(f"{name} {count}" for name, count in each["sources"].items())
        print_lines(f"step {each['step']}, epoch {each['epoch']}: {of_step}")
    return 0


# The order.


class _Numbers:
    """Samples whose chunks hold no ids, and tell numbers of parts in place of the starts of documents."""

    row_tokens = 1

    def __init__(self, of: Samples, bounds: Bounds, first_part: int) -> None:
        self._of, self._bounds, self._first_part = of, bounds, first_part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def read(self, reader: object, samples: Int64s, offset: int) -> Window:  # noqa: ARG002 - nothing is read
        return partial(self._numbers, samples, offset)

    def _numbers(self, samples: Int64s, offset: int, first: int, end: int) -> Chunk:
        by_tick = samples[:, first:end].T
        low, high = self._bounds(by_tick.reshape(-1), offset)
        parts = (self._first_part + places_of(low, high - low)).astype(np.int32)
        counts = (high - low).reshape(by_tick.shape).T
        none = np.zeros(counts.shape, np.int32)
        ids = Ragged.of_joined(parts[:0], none)
        return Chunk(lengths=none, ids=ids, starts=Ragged.of_joined(parts, counts))


def _steps(run: Run, named: Mapping[str, Parts], num_steps: int) -> dict[int, set[tuple[str, int]]]:
    """Return the steps before ``num_steps`` that saw named documents, and these: source and number."""
    sources: list[Any] = []
    document_of: list[tuple[str, int]] = []  # of each part
    for source in run.sources:
        assert source.samples is not None
        bounds, documents = _bounds_of(source.samples, named.get(source.name, Parts(_NONE, _NONE)))
        samples: Any = _Numbers(source.samples, bounds, len(document_of))
        sources.append(replace(source, samples=samples))
        document_of += [(source.name, number) for number in documents.tolist()]
    reader = RunReader(replace(run, sources=tuple(sources)), range(run.order.num_slots))

    def first_tick(step: int) -> int:
        return run.tick_of(Position(step))

    found: dict[int, set[tuple[str, int]]] = defaultdict(set)
    progress = Progress("looking through the order", first_tick(num_steps), unit="ticks")
    for epoch in range(run.epoch_of(num_steps) + 1):
        at = epoch * run.ticks_per_epoch
        end = min(at + run.ticks_in(epoch), first_tick(num_steps))
        for chunk in reader.chunks(epoch, 0, _CHUNK_TICKS, endless=False) if at < end else ():
            assert chunk.starts is not None
            counts = chunk.starts.counts.sum(axis=0)  # of each tick
            if counts.any():
                ticks = np.repeat(at + np.arange(chunk.num_ticks), counts).tolist()
                for tick, part in zip(ticks, chunk.starts.joined().flats[0].tolist(), strict=True):
                    if tick < end:
                        step = bisect_right(range(num_steps), tick, key=first_tick) - 1
                        found[step].add(document_of[part])
            at += chunk.num_ticks
            progress.add(chunk.num_ticks)
            if at >= end:
                break
    reader.close()
    return found


def _bounds_of(samples: Samples, named: Parts) -> tuple[Bounds, Int64s]:
    """Return what finds parts in samples, and the document of each part."""
    if not isinstance(samples, JoinedRows):
        sample = named.sample

        def bounds_of_stored(asked: Int64s, _: int) -> tuple[Int64s, Int64s]:
            return np.searchsorted(sample, asked, "left"), np.searchsorted(sample, asked, "right")

        return bounds_of_stored, named.document
    # A document is a stretch of the stream of tokens that rows are cut from. Shards follow each other in it.
    begins, ends = np.zeros((2, len(named.sample)), np.int64)
    shards, reader = samples.shards, samples.open()
    shard_of = shards.shard_of(named.sample)
    for number in np.unique(shard_of).tolist():
        lengths, here = reader.num_tokens_of(number), shard_of == number
        begin, end = samples.first_token[number : number + 2].tolist()
        has_more = end - begin > int(lengths.sum())  # an EOS is put behind each document
        sums = begin + np.concatenate([[0], np.cumsum(lengths + has_more)])
        place = named.sample[here] - shards.first_sample[number]
        begins[here], ends[here] = sums[place], sums[place + 1]
    reader.close()
    # Behind its end the stream goes on with its first token.
    kept, size = ends > begins, samples.offsets
    begins, ends = (np.concatenate([each[kept], each[kept] + size]) for each in (begins, ends))

    def bounds(asked: Int64s, offset: int) -> tuple[Int64s, Int64s]:
        first = (offset + asked * samples.row_tokens) % size
        last = first + samples.row_tokens
        if samples.keeps_tail:  # the last row is not full
            last = np.minimum(last, size)
        return np.searchsorted(ends, first, "right"), np.searchsorted(begins, last, "left")

    return bounds, np.tile(named.document[kept], 2)


# Names.


def find_documents(path: Path, shard_sets: Mapping[str, ShardSet]) -> dict[str, Parts]:
    """Find the documents of a list in sources: by source their parts, ascending.

    Raises NotFound where there is none, UsageError where a kind of name cannot be looked up there, BadInput.
    """
    folders = {data.folder for shards in shard_sets.values() for data in shards.datasets}
    plans = {folder: need_plan(folder) for folder in folders}
    wanted = _Wanted(path, max((plan.options.id_field for plan in plans.values()), default=""))
    if len(folders) > 1 and (wanted.addresses or "place" in wanted.names.kinds):
        raise UsageError(
            found=f"{path}, whose places may be of any of {len(folders)} data sets",
            expected="--ids NAME=FILE, for a source of one folder",
        )
    named = {}
    for name, shards in shard_sets.items():
        parts, num_documents = [Parts(_NONE, _NONE)], 0
        progress = Progress("looking for documents", shards.num_shards, unit="shards")
        for number in range(shards.num_shards):
            data, row = shards.locate(number)
            progress.add(1)
            if data.records is not None:  # a tar that others wrote, whose documents have no names
                continue
            found = wanted.parts_of(data.folder, plans[data.folder], int(data.shard_ids[row]))
            first, end = shards.first_sample[number : number + 2].tolist()
            samples = found.sample + first - shards.records_of(first, number)
            is_here = (samples >= first) & (samples < end)  # else it is of the other side of a split
            parts.append(Parts(samples[is_here], found.document[is_here] + num_documents))
            num_documents += int(found.document.max(initial=-1)) + 1
        sample, document = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.argsort(sample, kind="stable")
        named[name] = Parts(sample[order], document[order])
    if num_missing := int((~wanted.is_found).sum()):
        say(f"{num_missing} of {counted(len(wanted.is_found), 'name')} in {path} were not found")
    if not any(len(each.sample) for each in named.values()):
        raise NotFound(path=path, found="no document of these data", expected="a list of some")
    return named


class _Wanted:
    """What a list names: by names, or as an overlap.jsonl by addresses."""

    def __init__(self, path: Path, id_field: str) -> None:
        """Read the list. Raises NotFound, BadInput, UsageError."""
        self.names = DocumentNames(keys=np.zeros(0, DIGEST), kinds=frozenset())
        self.addresses: dict[int, list[tuple[int, int]]] = defaultdict(list)  # shard -> sample, part in it
        if path.suffix != ".jsonl":
            self.names = read_names(path, id_field=id_field)
        else:
            line = b""
            try:
                for line in read_lines(path):
                    shard_id, sample, *part = map(int, load_json(line)["document"].split(":"))
                    self.addresses[shard_id].append((sample, part[0] if part else 0))
            except NOT_THERE:
                raise NotFound(path=path, found="no such file", expected="a list of documents") from None
            except (ValueError, LookupError, TypeError, AttributeError):
                expected = 'JSON with "document": "SHARD:SAMPLE"'
                raise BadInput(path=path, found=repr(line[:60]), expected=expected) from None
        self.is_found = np.zeros(len(self.names.keys), np.bool_)

    def _is_named(self, keys: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Return which keys are of names, and note these as found."""
        of = self.names.find(keys)
        self.is_found[of[of >= 0]] = True
        return of >= 0

    def parts_of(self, folder: Path, plan: Plan, shard_id: int) -> Parts:
        """Find the parts of named documents in a shard; samples are as the shard counts them."""
        documents = self._by_text(folder, shard_id) if "text" in self.names.kinds else []
        places, addresses = self._places(folder, plan, shard_id), self.addresses.get(shard_id, [])
        if not documents and not places and not addresses:
            return Parts(_NONE, _NONE)
        with ShardSamples(folder, plan.spec, shard_id) as samples:
            pieces, records = pieces_of(samples), samples.records
        for sample, part in addresses:
            documents += pieces.document[pieces.record == sample][part : part + 1].tolist()
        place_of = list(zip(records["source"].tolist(), records["source_offset"].tolist(), strict=True))
        rows: list[int] = []
        if plan.spec.has_rows and places and place_of:
            end = _first_place_behind(folder, plan, shard_id) if max(places) > place_of[-1] else None
            places = {each for each in places if end is None or each < end}
            found, rows = _at_places(plan, place_of, pieces, places)
        else:
            found = {place: number for number, place in enumerate(place_of) if place in places}
        for input_number, offset in found:
            self._is_named(keys_of_places(plan.inputs[input_number].path, np.array([offset])))
        is_named = np.isin(pieces.document, [*documents, *found.values()])
        unknown = pieces.document.max(initial=-1) + 1 + np.arange(len(rows))
        return Parts(
            np.concatenate([pieces.record[is_named], np.array(rows, np.int64)]),
            np.concatenate([pieces.document[is_named], unknown]),
        )

    def _by_text(self, folder: Path, shard_id: int) -> list[int]:
        """Return the numbers of documents with a named text. Raises UsageError where no digests are kept."""
        stamp = read_manifest(folder, shard_id).digests
        if stamp is None:
            expected = "names by id or place, or a data set of plan --digests"
            raise UsageError(path=folder, found="no digests, by which texts are found", expected=expected)
        return np.flatnonzero(self._is_named(read_digests(folder, shard_id, stamp))).tolist()

    def _places(self, folder: Path, plan: Plan, shard_id: int) -> set[Place]:
        """Return the places of documents that are named by id, and those that may be of a shard."""
        found = set(named_places(self.names, plan.shard(shard_id).ranges))
        if "id" in self.names.kinds and plan.options.id_field:
            kept = list(kept_ids(folder, shard_id))
            is_named = self._is_named(keys_of_ids(name for *_, name in kept)).tolist()
            found |= {(each[0], each[1]) for each, named in zip(kept, is_named, strict=True) if named}
        return found


def _first_place_behind(folder: Path, plan: Plan, shard_id: int) -> Place | None:
    """Return where the first document of the next shard begins that has one."""
    for number in range(shard_id + 1, plan.num_shards):
        for record in read_idx(folder, plan.spec, number)[:1]:
            return int(record["source"]), int(record["source_offset"])
    return None


def _at_places(
    plan: Plan, place_of: Sequence[Place], pieces: Pieces, places: set[Place]
) -> tuple[dict[Place, int], list[int]]:
    """Return the documents of rows by where they begin, and rows of those that an idx does not tell.

    ``place_of``: of the document of each row's first token. What begins between two of these is in the first
    one's row alone, and gets a number of its own. Raises UsageError where rows do not follow the input.
    """
    if plan.options.pack == "best_fit" or plan.spec.validation_fraction:
        raise UsageError(
            found="names by id or place, for rows that do not follow the input",
            expected="sha256:HEX of texts, where the plan keeps digests, or an overlap.jsonl",
        )
    found, rows = dict[Place, int](), list[int]()
    for place in sorted(places):
        row = bisect_right(place_of, place) - 1
        if row >= 0 and place_of[row] == place:
            first = np.searchsorted(pieces.record, bisect_left(place_of, place))
            found[place] = int(pieces.document[first])
        elif row >= 0:
            found[place] = int(pieces.document.max()) + 1 + len(rows)
            rows.append(row)
    return found, rows
