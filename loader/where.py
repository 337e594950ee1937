"""``where``: which documents a training step saw, and in which steps a document is seen.

All follows from the order and the samples of a loader that is made as the run's was, and from the idx.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loader.dataloader import get_llama3_dataloader
from loader.find_shards import DatasetShards, ExternalTar, ShardSet
from loader.mixture import Mixture
from loader.order import Order
from loader.samples import DocumentPieces, JoinedRows, WholeSamples
from loader.state import STATE_FORMAT, Position, RunSteps, SizeHistory, SkippedSteps
from loader.token_loader import TokenLoader
from loader.withdrawn import ListHistory, marks_of_lists
from loader.workers import MixedSamples
from shardprep.console import print_lines, say
from shardprep.errors import BrokenShard, NotFound, UsageError
from shardprep.files import NOT_THERE
from shardprep.format.dataset_spec import read_input_names
from shardprep.format.idx import read_idx, samples_holding
from shardprep.format.input_formats import place_text
from shardprep.format.names import id_ranges
from shardprep.format.withdrawals import Withdrawals, withdrawal_path


@dataclass(frozen=True, kw_only=True)
class DocumentPart:
    """A part of a stored sample: of a document, or of a packed row."""

    tar: Path
    number: int  # of the stored sample in its shard, from 0
    is_row: bool
    place: str  # file and byte of the document; of a row, of the document of its first token
    num_documents: int  # that begin in a row; 1 for a document
    first_token: int  # of the stored sample
    num_tokens: int  # of it that were seen; an EOS that is put behind a document is not counted
    source: str = ""  # its name, where sources are mixed


@dataclass(frozen=True, kw_only=True)
class SeenSample:
    """One row of a batch."""

    rank: int
    batch: int  # of the rank's batches of the step
    row: int
    parts: list[DocumentPart]


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """Where a document comes: a step of the run, counted with those that it skipped, and its place there."""

    order_step: int
    rank: int
    batch: int
    row: int


class SeenDocuments:
    """What the run of a loader sees, amendments included; within ``with``, which closes its files.

    Steps are counted from 0 through all epochs, with those that were skipped. Raises UsageError for batches
    of tokens_per_batch, and for rows that are cut.
    """

    def __init__(self, loader: TokenLoader) -> None:
        plan = loader.chunks.plan
        self._order: Order | Mixture = plan.order
        self._run: RunSteps = plan.run
        if self._run.row_lengths != RunSteps.row_lengths:
            raise UsageError("this loader cuts rows, and what its steps saw is told of whole ones")
        is_mixed = isinstance(plan.samples, MixedSamples)
        samples = plan.samples.sources if is_mixed else [plan.samples]
        names = self._order.names if isinstance(self._order, Mixture) else ("",)
        orders = self._order.orders if isinstance(self._order, Mixture) else (self._order,)
        self.sources: dict[str, SeenSource] = {}
        for name, order, each in zip(names, orders, samples, strict=True):
            if each is None:  # dropped before the step that the loader stands at
                continue
            if not isinstance(each, (DocumentPieces, JoinedRows, WholeSamples)):
                raise UsageError(
                    "this loader makes batches of tokens_per_batch, and what its steps saw is told of "
                    "batches with equally many samples"
                )
            self.sources[name] = SeenSource(name, order, each)
        self._batch_size = loader.step_batches.batch_size
        self._of_rank = self._order.global_batch_size // loader.process_rank.world_size

    def __enter__(self) -> SeenDocuments:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self.sources.values():
            source.close()

    def of_step(self, step: int) -> list[SeenSample]:
        """The samples of a step, of all ranks."""
        first = self._run.first_of_order(step)
        found = [
            SeenSample(**self._place(place, number), parts=source.parts(epoch, sample))
            for number in range(self._run.order_steps_in(step))
            for place, (source, epoch, sample) in enumerate(self._samples_of(first + number))
        ]
        return sorted(found, key=lambda each: (each.rank, each.batch, each.row))

    def steps_of(self, stored: Mapping[str, npt.NDArray[np.int64]], end: int) -> list[Sighting]:
        """The steps before ``end`` in which stored samples are seen: of each source int64[n] of them."""
        found: list[Sighting] = []
        seen = self._seen_mixed if isinstance(self._order, Mixture) else self._seen
        for order_step, place in seen(stored, self._run.first_of_order(end)):
            step, number = self.step_of(order_step)
            if number >= 0 and step < end:
                found.append(Sighting(order_step=step, **self._place(place, number)))
        return sorted(found, key=lambda each: (each.order_step, each.rank, each.batch, each.row))

    def step_of(self, order_step: int) -> tuple[int, int]:
        """The step that a step of the order is in, and which one of it, from 0; -1: it was left out between
        this step and the one before."""
        step = self._run.step_from(order_step)
        if self._run.first_of_order(step) == order_step:
            return step, 0
        number = order_step - self._run.first_of_order(step - 1)
        return (step - 1, number) if number < self._run.order_steps_in(step - 1) else (step, -1)

    def _samples_of(self, order_step: int) -> Iterator[tuple[SeenSource, int, int]]:
        """The source, its epoch and the sample of each place of a step of the order."""
        order = self._order
        if not isinstance(order, Mixture):
            (source,) = self.sources.values()
            epoch, step = divmod(order_step, order.steps_per_epoch)
            yield from ((source, epoch, sample) for sample in source.step_samples(epoch, step))
            return
        part = order.round_at(order_step)
        pattern = order.pattern(part, range(order.num_slots))[:, : order_step - part.first_step + 1]
        for slot, numbers in enumerate(pattern.tolist()):
            number = numbers.pop()
            name = order.names[number]
            if name not in self.sources:
                raise UsageError(f"the step has samples of {name}; name its shards, too: {name}=PATH")
            source = self.sources[name]
            before = int(part.taken[number] + part.ahead[slot, number]) + numbers.count(number)
            epoch, step = divmod(before, source.order.steps_per_epoch)
            samples = source.step_samples(epoch, step)[slot * order.group : (slot + 1) * order.group]
            yield from ((source, epoch, sample) for sample in samples)

    def _seen(self, stored: Mapping[str, npt.NDArray[np.int64]], end: int) -> Iterator[tuple[int, int]]:
        """The step of the order and the place in it of stored samples, before a step of the order."""
        (source,) = self.sources.values()
        num_epochs = -(-end // source.order.steps_per_epoch) if len(stored[source.name]) else 0
        yield from source.places_of(stored[source.name], num_epochs)

    def _seen_mixed(self, stored: Mapping[str, npt.NDArray[np.int64]], end: int) -> Iterator[tuple[int, int]]:
        """The same in a mixture, by all of its rounds."""
        assert isinstance(self._order, Mixture)
        order, last = self._order, self._order.round_at(max(end - 1, 0))
        most = last.taken + last.ahead.max(axis=0) + len(last.sources)  # steps of each source
        wanted: dict[int, npt.NDArray[np.int64]] = {}
        for number, name in enumerate(order.names):
            if len(stored.get(name, ())):
                source = self.sources[name]
                found = source.places_of(stored[name], int(most[number]) // source.order.steps_per_epoch + 1)
                wanted[number] = np.array(
                    [step * order.global_batch_size + place for step, place in found], np.int64
                )
        first = 0
        while first < end and wanted:
            part = order.round_at(first)
            pattern = order.pattern(part, range(order.num_slots))[:, : part.end_step - part.first_step]
            for number, keys in wanted.items():
                is_here = pattern == number
                steps = part.taken[number] + part.ahead[:, [number]] + np.cumsum(is_here, axis=1) - 1
                for within in range(order.group):
                    places = np.arange(order.num_slots)[:, None] * order.group + within
                    hits = is_here & np.isin(steps * order.global_batch_size + places, keys)
                    for slot, column in zip(*map(np.ndarray.tolist, np.nonzero(hits)), strict=True):
                        yield part.first_step + column, slot * order.group + within
            first = part.end_step

    def _place(self, place: int, number: int) -> dict[str, int]:
        """Where a sample stands, by its place in the ``number``-th step of the order of a step."""
        rank, of_rank = divmod(place, self._of_rank)
        batch, row = divmod(of_rank, self._batch_size)
        return {"rank": rank, "batch": number * self._run.num_batches + batch, "row": row}

    def stored_at(self, name: str, offset: int) -> dict[str, npt.NDArray[np.int64]]:
        """The stored samples of each source that hold the document at a byte of an input: documents, or rows
        that may; of a number, sample ``offset`` of that shard. Raises NotFound for an unknown input,
        UsageError where rows are in no order of the input."""
        found = {key: source.stored_at(name, offset) for key, source in self.sources.items()}
        if all(samples is None for samples in found.values()):
            raise NotFound(f"no data set here has an input {name}; the inputs are named as in its plan.json")
        return {key: np.array(samples or [], np.int64) for key, samples in found.items()}


class SeenSource:
    """The samples of one data set or source of a run, and its order."""

    def __init__(self, name: str, order: Order, samples: DocumentPieces | JoinedRows | WholeSamples) -> None:
        self.name = name
        self.order = order
        self._samples = samples
        self.shards = samples.shards
        self._reader = samples.open()
        self._num_tokens = partial(samples.num_tokens, self._reader)
        self._steps: dict[tuple[int, int], list[int]] = {}
        self._idx: dict[int, npt.NDArray[np.void] | None] = {}
        self._names: dict[Path, list[str]] = {}

    def close(self) -> None:
        """Close its files."""
        self._reader.close()

    def step_samples(self, epoch: int, step: int) -> list[int]:
        """The samples of a step of its own order."""
        if (epoch, step) not in self._steps:
            self._steps[epoch, step] = self.order.step_samples(epoch, step, self._num_tokens).tolist()
        return self._steps[epoch, step]

    def places_of(self, stored: npt.NDArray[np.int64], num_epochs: int) -> Iterator[tuple[int, int]]:
        """Steps of its own order, counted through its epochs, and places in them that see stored samples."""
        for epoch in range(num_epochs):
            wanted = self._wanted(stored, epoch)
            for start, end in self.order.windows(0):
                slots = range(self.order.num_slots)
                samples = self.order.samples_of(epoch, slots, start, end, self._num_tokens)
                for place, column in zip(*np.nonzero(np.isin(samples, wanted)), strict=True):
                    yield epoch * self.order.steps_per_epoch + start + int(column), int(place)

    def _wanted(self, stored: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        """The samples of an epoch's order that hold a part of some stored ones."""
        if isinstance(self._samples, JoinedRows):
            rows = self._samples
            offset = self.order.offset(epoch, rows.offsets)
            parts = []
            for begin, end in (rows.stream_place(self._reader, sample) for sample in stored.tolist()):
                tokens = np.arange(begin - offset, end - offset, rows.seq_len)
                parts.append(np.append(tokens, end - offset - 1)[: None if end > begin else 0])
            return np.unique(np.concatenate(parts) % rows.offsets // rows.seq_len)
        if isinstance(self._samples, DocumentPieces):
            return self._samples.of_documents(self._reader, stored)
        return stored

    def parts(self, epoch: int, sample: int) -> list[DocumentPart]:
        """What a sample of an epoch is made of."""
        if isinstance(self._samples, JoinedRows):
            offset = self.order.offset(epoch, self._samples.offsets)
            found = self._samples.documents_of(self._reader, sample, offset)
            return [self._part(*document) for document in found]
        longest = self._samples.max_length
        if isinstance(self._samples, WholeSamples):
            return [self._part(sample, 0, longest)]
        documents, first = self._samples.locate(self._reader, np.array([sample]))
        return [self._part(int(documents[0]), int(first[0]), longest)]

    def _part(self, stored: int, first_token: int, most_tokens: int | None) -> DocumentPart:
        shard = int(self.shards.shard_of(np.array(stored)))
        source, row = self.shards.locate(shard)
        number = stored - int(self.shards.first_sample[shard])
        left = int(self._reader.num_tokens_of(shard)[number]) - first_token
        number = int(self.shards.rows_of(shard, np.array([stored]))[0])
        records = self._records(shard, source, row)
        place, num_documents = source.path_of(row).name, 1
        if records is not None and isinstance(source, DatasetShards):
            record = records[number]
            names, of_input = self._input_names(source), int(record["source"])
            known = names[of_input] if of_input < len(names) else f"input {of_input}"
            place = place_text(known, int(record["source_offset"]))
            num_documents = int(record["num_starts"]) if source.row_tokens else 1
        return DocumentPart(
            tar=source.path_of(row),
            number=number,
            is_row=source.row_tokens > 0,
            place=place,
            num_documents=num_documents,
            first_token=first_token,
            num_tokens=left if most_tokens is None else min(left, most_tokens),
            source=self.name,
        )

    def _records(self, shard: int, source: DatasetShards | ExternalTar, row: int) -> Any:
        """The idx of a shard; None for tars of others, and where it is missing."""
        if shard not in self._idx:
            self._idx[shard] = None
            if isinstance(source, DatasetShards):
                with contextlib.suppress(NotFound):
                    self._idx[shard] = read_idx(source.folder, source.spec, int(source.shard_ids[row]))
        return self._idx[shard]

    def _input_names(self, source: DatasetShards) -> list[str]:
        if source.folder not in self._names:
            try:
                self._names[source.folder] = read_input_names(source.folder)
            except NOT_THERE:  # a copy without its plan: inputs have numbers alone
                self._names[source.folder] = []
        return self._names[source.folder]

    def stored_at(self, name: str, offset: int) -> list[int] | None:
        """See SeenDocuments; None where it has no such input."""
        found: list[int] = []
        known = False
        for number, source in enumerate(self.shards.sources):
            if not isinstance(source, DatasetShards):
                continue
            first = int(self.shards.source_first[number])
            if name.isdigit() and len(row := np.flatnonzero(source.shard_ids == int(name))):
                known = True
                places = int(self.shards.first_record[first + row[0]]) + np.array([offset])
                if offset < self.shards.num_records[first + row[0]]:
                    found += self.shards.samples_at(places).tolist()
            elif name in (names := self._input_names(source)):
                known = True
                found += self._in_source(source, first, (names.index(name), offset))
        return found if known else None

    def _in_source(self, source: DatasetShards, first: int, place: tuple[int, int]) -> list[int]:
        """Shards are parts of the inputs in order, so the one that may hold a place is found by halves."""
        rows = range(len(source.shard_ids))
        end = bisect_right(rows, place, key=lambda row: self._first_place(source, first, row) or (-1, -1))
        for row in reversed(rows[:end]):
            if (begins := self._first_place(source, first, row)) is not None and begins <= place:
                records = self._records(first + row, source, row)
                first_record = int(self.shards.first_record[first + row])
                num_train = len(records) - max(int(self.shards.num_planned[first + row]), 0)
                held = np.array(samples_holding(records, place, num_train), np.int64)
                return self.shards.samples_at(first_record + held).tolist()
        return []

    def _first_place(self, source: DatasetShards, first: int, row: int) -> tuple[int, int] | None:
        records = self._records(first + row, source, row)
        if records is None or not len(records):
            return None
        return min(zip(records["source"].tolist(), records["source_offset"].tolist(), strict=True))


_MAX_FOUND = 20  # stored samples that --find takes
_READ_SAMPLES = 256  # at once, of a search for a text
_OF_LOADER = (
    "model_id", "batch_size", "global_batch_size", "world_size", "seed", "shuffle", "seq_len", "max_length",
    "long_documents", "group_by_length", "exclude_shards", "split", "validation_fraction",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Name the documents of a training step, with file and byte, given the loader's settings or the state "
        "that a checkpoint holds; or with --find the steps that see a document."
    )
    text = "as the loader was given; of a mixture NAME=PATH, again for each folder of a source"
    parser.add_argument("input_shards", nargs="+", help=text)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--step", type=int, help="training step, from 0 (default: the last one of --state)")
    what.add_argument(
        "--withdrawn",
        action="store_true",
        help="which steps of the run of --state saw documents that are withdrawn by now",
    )
    what.add_argument(
        "--find",
        help="a text, FILE:BYTE of an input, or SHARD:SAMPLE: in which steps it is seen (default: --step)",
    )
    parser.add_argument(
        "--state", type=Path, help="a checkpoint of torch.save, or JSON, that holds a state (default: none)"
    )
    parser.add_argument("--rank", type=int, help="only what this rank saw (default: all)")
    parser.add_argument("--epochs", type=int, default=1, help="epochs that --find searches (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    loader = parser.add_argument_group("the loader's settings, where no --state has them")
    loader.add_argument(
        "--model_id", help="whose tokenizer made tars of other tools (default: the data set's own)"
    )
    for name, text in {
        "batch_size": "samples per batch on each rank (default: global_batch_size / world_size)",
        "global_batch_size": "samples of an optimizer step (default: batch_size x world_size)",
        "world_size": "ranks (default: 1)",
        "seed": "seed of the shuffle (default: 0)",
        "seq_len": "tokens of a row that is packed at load (default: not packed)",
        "max_length": "tokens at which documents are cut (default: none)",
    }.items():
        loader.add_argument(f"--{name}", type=int, help=text)
    loader.add_argument(
        "--shuffle", action=argparse.BooleanOptionalAction, help="shuffled order (default: on)"
    )
    loader.add_argument(
        "--long_documents",
        choices=("truncate", "split", "error"),
        help="what happens to a longer document (default: truncate)",
    )
    loader.add_argument("--split", choices=("train", "validation"), help="one side (default: both)")
    loader.add_argument(
        "--validation_fraction",
        type=float,
        help="the part held out, if the plan does not say it (default: none)",
    )
    loader.add_argument("--group_by_length", type=int, help="samples per group (default: none)")
    loader.add_argument("--exclude_shards", nargs="+", help="numbers or tars (default: none)")


def where(args: argparse.Namespace) -> int:
    """``where DATA``: print what a step saw, or where a document is seen."""
    state = None if args.state is None else find_state(args.state)
    if args.step is None and args.find is None and state is None and not args.withdrawn:
        raise UsageError("nothing is asked: give --step, --find or --state")
    if args.withdrawn and state is None:
        raise UsageError("--withdrawn tells of a run, by the state in a checkpoint of it: give --state FILE")
    if args.epochs < 1 or (args.step is not None and args.step < 0):
        raise UsageError(f"--step {args.step} --epochs {args.epochs}: expected a step from 0, epochs from 1")
    options = loader_options(vars(args), state)
    with (
        _only_errors_logged(),
        get_llama3_dataloader(**_named_sources(args), **options) as loader,
    ):
        skipped = SkippedSteps()
        if state is not None:
            loader.load_state_dict({**state, "num_micro": 0})
            skipped = SkippedSteps.of_text(state.get("skipped", ""))
        if args.rank is not None and not 0 <= args.rank < loader.process_rank.world_size:
            raise UsageError(
                f"--rank is {args.rank}, the ranks are 0 to {loader.process_rank.world_size - 1}"
            )
        with SeenDocuments(loader) as seen:
            if args.withdrawn and state is not None:
                _tell_withdrawn(args, loader.run, seen, state, skipped)
                return 0
            until = None if state is None else _until(loader.run, state)
            if args.find is None:
                # By default the last one that was trained.
                step = max(0, skipped.trained(until or 0) - 1) if args.step is None else args.step
                if until is not None and options.get("amend") and skipped.order_step(step) >= until:
                    raise UsageError(
                        f"step {step} is behind the state, which is of step {skipped.trained(until)}, and "
                        "what comes then is up to the run's weights and sizes; take a later checkpoint"
                    )
                _tell_documents(args, loader.run, seen, step, skipped.order_step(step))
                return 0
            stored, end = _stored(loader, seen, args.find), loader.run.first_step(args.epochs)
            if until is not None and options.get("amend"):
                end = min(end, until)
            _tell_steps(args, loader.run, seen.steps_of(stored, end), sum(map(len, stored.values())), skipped)
    return 0


def _until(run: RunSteps, state: Mapping[str, Any]) -> int:
    """The step at which a state stands."""
    return run.step_of(Position(epoch=state["epoch"], step=state["step"]))


def _named_sources(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of a loader: what it reads. NAME=PATH is a source of a mixture, PATH alone no mixture."""
    named: dict[str, list[str]] = {}
    for text in args.input_shards:
        name, equals, path = text.partition("=")
        if not equals or "/" in name or Path(text).exists():
            break
        named.setdefault(name, []).append(path)
    else:
        if args.state is None:
            raise UsageError("a mixture is told by its run's state: give --state FILE")
        return {"input_shards": named, "weights": dict.fromkeys(named, 1), "weights_in": "samples"}
    if named:
        raise UsageError(f"{text} names no source, as {args.input_shards[0]} does: expected NAME=PATH")
    return {"input_shards": args.input_shards}


@contextlib.contextmanager
def _only_errors_logged() -> Iterator[None]:
    """Leave out what the loader says of itself: this one reads no sample."""
    logger = logging.getLogger("loader")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def find_state(path: Path) -> dict[str, Any]:
    """The loader's state in a file, however deep it lies there. Raises NotFound or BrokenShard."""
    if not path.is_file():
        raise NotFound(f"--state {path} is no file")
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_bytes())
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch and pickle raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BrokenShard(
            f"--state {path} cannot be read: {reason}; expected torch.save's, or .json"
        ) from None
    state = next(_states_in(content), None)
    if state is None:
        raise NotFound(
            f"--state {path} holds no state of a loader; save loader.state_dict() with the checkpoint"
        )
    return dict(state)


def _states_in(content: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(content, Mapping):
        if content.get("format") == STATE_FORMAT:
            yield content
        for value in content.values():
            yield from _states_in(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _states_in(value)


def loader_options(given: Mapping[str, Any], state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of a loader as the run's was: the state's, and what the flags say. Raises UsageError."""
    options: dict[str, Any] = {"world_size": 1}
    if state is not None:
        of_run = state.get("fingerprint", {})
        history = SizeHistory.of_fingerprint(of_run)
        if history is not None and history.row_lengths != RunSteps.row_lengths:
            raise UsageError(
                f"the state is of a run that cuts rows (seq_len {of_run['seq_len']}), and what its steps saw "
                "is told of whole rows alone"
            )
        if history is not None:
            options["global_batch_size"] = history.order_batch_size
            options["amend"] = history.changes or "sources" in of_run  # from the state on, where nobody asks
        names = ("seed", "shuffle", "group_by_length", "long_documents")
        options |= {name: of_run[name] for name in names if name in of_run}
        options |= {name: of_run.get(name) or None for name in ("seq_len", "max_length")}
        if group := of_run.get("split_group"):
            options["validation_fraction"] = 1 / group
        options |= {"split": of_run.get("split")} | dict(state.get("layout", {}))
    options |= {name: given[name] for name in _OF_LOADER if given.get(name) is not None}
    if "batch_size" not in options:
        if "global_batch_size" not in options:
            raise UsageError("the run's --global_batch_size is needed, or its --batch_size and --world_size")
        options["batch_size"] = max(1, options["global_batch_size"] // options["world_size"])
    return {**options, "rank": 0, "num_workers": 0, "pin_memory": False}


def _tell_documents(
    args: argparse.Namespace, run: RunSteps, seen: SeenDocuments, step: int, order_step: int
) -> None:
    at = run.position(order_step)
    epoch, in_epoch = at.epoch, at.step
    samples = [each for each in seen.of_step(order_step) if args.rank in (None, each.rank)]
    if args.json:
        answer = {"step": step, "epoch": epoch, "step_of_epoch": in_epoch}
        parts = [dataclasses.asdict(each) for each in samples]
        print_lines(json.dumps({**answer, "samples": parts}, default=str))
        return
    of_epoch = f"step {in_epoch} of {run.steps_in(epoch)}"
    print_lines(f"step {step}: epoch {epoch}, {of_epoch}, {len(samples)} samples")
    for each in samples:
        for part in each.parts:
            print_lines(f"rank {each.rank} batch {each.batch} row {each.row}: {_part_text(part)}")


def _part_text(part: DocumentPart) -> str:
    source = f"{part.source}: " if part.source else ""
    tokens = f"tokens {part.first_token} to {part.first_token + part.num_tokens}"
    if part.is_row:
        begin = f"{part.num_documents} documents begin in it, its first token is of the one at {part.place}"
        return f"{source}{part.tar.name} row {part.number}, {tokens}: {begin}"
    return f"{source}{part.place}, {tokens} ({part.tar.name} document {part.number})"


def _stored(loader: TokenLoader, seen: SeenDocuments, text: str) -> dict[str, npt.NDArray[np.int64]]:
    """The stored samples of each source that --find names. Raises NotFound."""
    name, colon, offset = text.rpartition(":")
    if colon and offset.isdigit() and name:
        stored = seen.stored_at(name, int(offset))
    else:
        stored = {name: _with_text(loader, source.shards, text) for name, source in seen.sources.items()}
    if not any(map(len, stored.values())):
        raise NotFound(f"--find {text!r}: no document has it")
    return stored


def _with_text(loader: TokenLoader, shards: ShardSet, text: str) -> npt.NDArray[np.int64]:
    """The first stored samples whose decoded ids hold a text; reads the whole data set until then."""
    samples, found = WholeSamples(shards=shards), []
    reader = samples.open()
    for first in range(0, shards.num_samples, _READ_SAMPLES):
        numbers = np.arange(first, min(first + _READ_SAMPLES, shards.num_samples))
        chunk = samples.read(reader, numbers[None], 0)(0, len(numbers))
        ends = np.cumsum(chunk.lengths[0])
        for place, number in enumerate(numbers.tolist()):
            end, length = int(ends[place]), int(chunk.lengths[0, place])
            is_flat = isinstance(chunk.ids, np.ndarray)
            ids: Any = chunk.ids[end - length : end] if is_flat else chunk.ids[0, place][:length]
            if text in loader.tokenizer.decode(ids):
                found.append(number)
        if len(found) >= _MAX_FOUND:
            say(f"note: the first {_MAX_FOUND} samples with this text are taken")
            break
    reader.close()
    return np.array(found[:_MAX_FOUND], np.int64)


def _tell_steps(
    args: argparse.Namespace,
    run: RunSteps,
    sightings: list[Sighting],
    num_stored: int,
    skipped: SkippedSteps,
) -> None:
    shown = [each for each in sightings if args.rank in (None, each.rank)]
    lines = [{**dataclasses.asdict(each), "step": _trained(each.order_step, skipped)} for each in shown]
    if args.json:
        print_lines(json.dumps({"num_samples": num_stored, "epochs": args.epochs, "seen": lines}))
        return
    print_lines(f"{num_stored} stored samples, seen {len(lines)} times in {args.epochs} epochs:")
    for line in lines:
        at = run.position(int(line["order_step"] or 0))
        trained = "left out by skip" if line["step"] is None else f"step {line['step']}"
        place = f"rank {line['rank']} batch {line['batch']} row {line['row']}"
        print_lines(f"{trained} (epoch {at.epoch}, step {at.step}): {place}")


def _tell_withdrawn(
    args: argparse.Namespace,
    run: RunSteps,
    seen: SeenDocuments,
    state: Mapping[str, Any],
    skipped: SkippedSteps,
) -> None:
    history = ListHistory.of_text(state.get("withdrawn", ""))
    until = _until(run, state) + (state["num_micro"] > 0)
    answers: list[dict[str, Any]] = []
    for source in seen.sources.values():
        for number, dataset in enumerate(source.shards.sources):
            lists = dataset.withdrawn.lists if isinstance(dataset, DatasetShards) else ()
            for place, each in enumerate(lists):
                since = history.first_step_of(each.plan_id, [later.sha256 for later in lists[place:]])
                masked_from = None if since is None else seen.step_of(since)[0]
                end = until if masked_from is None else min(masked_from, until)
                marks = marks_of_lists(source.shards, number, Withdrawals(lists=(each,)))
                sightings = seen.steps_of({source.name: source.shards.samples_at(marks[:, 0])}, end)
                steps = {
                    _trained(one.order_step, skipped) for one in sightings if args.rank in (None, one.rank)
                }
                answers.append(
                    {
                        "list": str(withdrawal_path(dataset.path_of(0).parent, each.number)),
                        "made": each.made,
                        "reason": each.reason,
                        "num_documents": each.num_documents,
                        "masked_from": None if masked_from is None else skipped.trained(masked_from),
                        "steps": sorted(step for step in steps if step is not None),
                    }
                )
    if args.json:
        print_lines(json.dumps({"until_step": skipped.trained(until), "lists": answers}))
        return
    print_lines(f"{len(answers)} lists of withdrawn documents, a run of {skipped.trained(until)} steps")
    for answer in answers:
        steps_text = f"in steps {id_ranges(answer['steps'])}" if answer["steps"] else "in no step"
        masked = "" if answer["masked_from"] is None else f", and masked from step {answer['masked_from']} on"
        print_lines(
            f"{answer['list']} ({answer['made']}, {answer['reason'] or 'no reason given'}): its "
            f"{answer['num_documents']:,} documents were seen {steps_text}{masked}"
        )


def _trained(order_step: int, skipped: SkippedSteps) -> int | None:
    """The step of training that a step of the order is; None where it was skipped."""
    if any(first <= order_step < end for first, end in skipped.ranges):
        return None
    return skipped.trained(order_step)
