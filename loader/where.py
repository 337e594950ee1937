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
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loader.dataloader import get_llama3_dataloader
from loader.find_shards import DatasetShards, ShardSet, SplitName
from loader.mixture import Mixture, Round, Stage
from loader.order import Order
from loader.samples import JoinedRows, LongDocuments, WholeSamples
from loader.state import STATE_FORMAT, Position, RunSteps, SizeHistory, SkippedSteps
from loader.token_loader import TokenLoader
from loader.withdrawn import ListHistory, marks_of_lists
from loader.workers import MixedSamples
from shardprep.command_line import add_flags_of, given_of, option
from shardprep.console import print_lines, say
from shardprep.errors import BrokenShard, NotFound, UsageError
from shardprep.files import NOT_THERE
from shardprep.format.checked_json import load_json
from shardprep.format.dataset_spec import read_input_names
from shardprep.format.idx import read_idx, samples_holding
from shardprep.format.input_formats import name_of_input, place_text
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

    Steps are counted from 0 through all epochs, with those that were skipped.
    """

    def __init__(self, loader: TokenLoader) -> None:
        plan = loader.chunks.plan
        self._run: RunSteps = plan.run
        order = plan.order
        if not isinstance(order, Mixture):  # one set is a mixture of one
            order = Mixture(
                names=("",),
                orders=(order,),
                stages=(Stage(first_step=0, weights=(1.0,)),),
                global_batch_size=order.global_batch_size,
                group=order.group,
                seed=order.seed,
            )
        self._order: Mixture = order
        samples = plan.samples.sources if isinstance(plan.samples, MixedSamples) else [plan.samples]
        self.sources: dict[str, SeenSource] = {}
        for name, of_source, each in zip(order.names, order.orders, samples, strict=True):
            if each is None:  # dropped before the step that the loader stands at
                continue
            assert isinstance(each, (JoinedRows, WholeSamples))
            self.sources[name] = SeenSource(name, of_source, each)
        self._batch_size = loader.step_batches.batch_size
        self._of_rank = order.global_batch_size // loader.process_rank.world_size

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
        return sorted(found, key=attrgetter("rank", "batch", "row"))

    def steps_of(self, stored: Mapping[str, npt.NDArray[np.int64]], end: int) -> list[Sighting]:
        """The steps before ``end`` in which stored samples are seen: of each source int64[n] of them."""
        order, end_of_order = self._order, self._run.first_of_order(end)
        last = order.round_at(max(end_of_order - 1, 0))
        num_steps = np.minimum(last.taken + last.ahead.max(axis=0) + len(last.sources), end_of_order)
        wanted: dict[int, npt.NDArray[np.int64]] = {}  # by source: its steps and the places in them, as keys
        for number, name in enumerate(order.names):
            if len(stored.get(name, ())):
                source = self.sources[name]
                num_epochs = -(-int(num_steps[number]) // source.order.steps_per_epoch)
                places = source.places_of(stored[name], num_epochs)
                wanted[number] = np.sort([step * order.global_batch_size + place for step, place in places])
        found: list[Sighting] = []
        first = 0
        while first < end_of_order and any(map(len, wanted.values())):
            part = order.round_at(first)
            for order_step, place in self._seen_in(part, wanted):
                step, number = self.step_of(order_step)
                if number >= 0 and step < end:
                    found.append(Sighting(order_step=step, **self._place(place, number)))
            first = part.end_step
        return sorted(found, key=attrgetter("order_step", "rank", "batch", "row"))

    def _seen_in(self, part: Round, wanted: Mapping[int, npt.NDArray[np.int64]]) -> Iterator[tuple[int, int]]:
        """Steps of the order in a round, and places in them, at which a source has one of its keys."""
        order = self._order
        ends = part.taken + part.ahead.max(axis=0) + len(part.sources)
        bounds = (np.stack([part.taken, ends]) * order.global_batch_size).T
        near = {
            number: keys[slice(*np.searchsorted(keys, bounds[number]))] for number, keys in wanted.items()
        }
        if not any(map(len, near.values())):
            return
        pattern = order.pattern(part, range(order.num_slots))[:, : part.end_step - part.first_step]
        for number, keys in near.items():
            is_here = pattern == number
            steps = part.taken[number] + part.ahead[:, [number]] + np.cumsum(is_here, axis=1) - 1
            for within in range(order.group):
                places = np.arange(order.num_slots)[:, None] * order.group + within
                hits = is_here & np.isin(steps * order.global_batch_size + places, keys)
                for slot, column in zip(*map(np.ndarray.tolist, np.nonzero(hits)), strict=True):
                    yield part.first_step + column, slot * order.group + within

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

    def __init__(self, name: str, order: Order, samples: JoinedRows | WholeSamples) -> None:
        self.name, self.order, self.shards = name, order, samples.shards
        self._samples = samples
        self._reader = samples.open()
        self.close = self._reader.close
        self._num_tokens = partial(samples.num_tokens, self._reader)
        # Each is worked out, or read, once.
        self.step_samples = cache(self._step_samples)
        self._records = cache(self._read_records)
        self._input_names = cache(_read_names)

    def _step_samples(self, epoch: int, step: int) -> list[int]:
        samples: list[int] = self.order.step_samples(epoch, step, self._num_tokens).tolist()
        return samples

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
        return stored

    def parts(self, epoch: int, sample: int) -> list[DocumentPart]:
        if isinstance(self._samples, JoinedRows):
            offset = self.order.offset(epoch, self._samples.offsets)
            found = self._samples.documents_of(self._reader, sample, offset)
            return [self._part(*document) for document in found]
        return [self._part(sample, 0, self._samples.max_length)]

    def _part(self, stored: int, first_token: int, most_tokens: int | None) -> DocumentPart:
        shard = int(self.shards.shard_of(np.array(stored)))
        source, row = self.shards.locate(shard)
        local = stored - int(self.shards.first_sample[shard])
        left = int(self._reader.num_tokens_of(shard)[local]) - first_token
        number = int(self.shards.rows_of(shard, np.array([stored]))[0])
        records = self._records(shard)
        place, num_documents = source.path_of(row).name, 1
        if records is not None and isinstance(source, DatasetShards):
            record = records[number]
            names, of_input = self._input_names(source.folder), int(record["source"])
            place = place_text(name_of_input(names, of_input), int(record["source_offset"]))
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

    def _read_records(self, shard: int) -> npt.NDArray[np.void] | None:
        """The idx of a shard; None for tars of others, and where it is missing."""
        source, row = self.shards.locate(shard)
        if isinstance(source, DatasetShards):
            with contextlib.suppress(NotFound):
                return read_idx(source.folder, source.spec, int(source.shard_ids[row]))
        return None

    def stored_at(self, name: str, offset: int) -> list[int] | None:
        """See SeenDocuments; None where it has no such input."""
        found: list[int] | None = None
        for first, source in zip(self.shards.source_first.tolist(), self.shards.sources, strict=False):
            if not isinstance(source, DatasetShards):
                continue
            if name.isdigit() and len(row := np.flatnonzero(source.shard_ids == int(name))):
                shard, numbers = first + int(row[0]), np.array([offset])
                numbers = numbers[numbers < self.shards.num_records[shard]]
            elif name in (names := self._input_names(source.folder)):
                shards = range(first, first + len(source.shard_ids))
                shard, numbers = self._in_source(shards, (names.index(name), offset))
            else:
                continue
            before = int(self.shards.first_record[shard])
            found = [*(found or []), *self.shards.samples_at(before + numbers).tolist()]
        return found

    def _in_source(self, shards: range, place: tuple[int, int]) -> tuple[int, npt.NDArray[np.int64]]:
        """The shard that may hold a place of the inputs, and which of its samples do. Shards are parts of the
        inputs in order, so it is found by halves."""

        def first_place(shard: int) -> tuple[int, int]:
            records = self._records(shard)
            if records is None or not len(records):
                return (-1, -1)
            return min(zip(records["source"].tolist(), records["source_offset"].tolist(), strict=True))

        for shard in reversed(shards[: bisect_right(shards, place, key=first_place)]):
            if (-1, -1) < first_place(shard) <= place and (records := self._records(shard)) is not None:
                num_train = len(records) - max(int(self.shards.num_planned[shard]), 0)
                return shard, np.array(samples_holding(records, place, num_train), np.int64)
        return shards.start, np.empty(0, np.int64)


def _read_names(folder: Path) -> list[str]:
    """The inputs of a data set; none of a copy without its plan, where they have numbers alone."""
    try:
        return read_input_names(folder)
    except NOT_THERE:
        return []


_MAX_FOUND = 20  # stored samples that --find takes
_READ_SAMPLES = 256  # at once, of a search for a text


@dataclass(frozen=True, kw_only=True)
class LoaderFlags:
    """Arguments of the loader that are flags of the command; of those that are not given, a state decides."""

    model_id: str | None = option(
        None, "whose tokenizer made tars of other tools (default: the data set's own)"
    )
    batch_size: int | None = option(
        None, "samples per batch on each rank (default: global_batch_size / world_size)"
    )
    global_batch_size: int | None = option(
        None, "samples of an optimizer step (default: batch_size x world_size)"
    )
    world_size: int = option(1, "ranks")
    seed: int = option(0, "seed of the shuffle (default: 0)")
    seq_len: int | None = option(None, "tokens of a row that is packed at load (default: not packed)")
    max_length: int | None = option(None, "tokens at which documents are cut")
    shuffle: bool = option(True, "shuffled order")
    long_documents: LongDocuments = option("truncate", "what happens to a longer document")
    split: SplitName | None = option(None, "one side (default: both)")
    validation_fraction: float | None = option(None, "the part held out, if the plan does not say it")
    group_by_length: int | None = option(None, "samples per group")


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
    add_flags_of(loader, LoaderFlags)
    loader.add_argument("--exclude_shards", nargs="+", help="numbers or tars (default: none)")


class _Asked(NamedTuple):
    """The command's flags, and the run that they ask about."""

    args: argparse.Namespace
    loader: TokenLoader
    seen: SeenDocuments
    state: Mapping[str, Any]
    skipped: SkippedSteps
    until: int | None  # the step at which the state stands
    limit: int | None  # the same, where what comes then is up to the weights and sizes of the run

    def trained(self, order_step: int) -> int | None:
        """The step of training that a step of the run is; None where it was skipped."""
        if any(first <= order_step < end for first, end in self.skipped.ranges):
            return None
        return self.skipped.trained(order_step)


def where(args: argparse.Namespace) -> int:
    """``where DATA``: print what a step saw, or where a document is seen."""
    state = None if args.state is None else find_state(args.state)
    if args.step is None and args.find is None and state is None and not args.withdrawn:
        raise UsageError("nothing is asked: give --step, --find or --state")
    if args.withdrawn and state is None:
        raise UsageError("--withdrawn tells of a run, by the state in a checkpoint of it: give --state FILE")
    if args.epochs < 1 or (args.step is not None and args.step < 0):
        raise UsageError(f"--step {args.step} --epochs {args.epochs}: expected a step from 0, epochs from 1")
    given = given_of(args, LoaderFlags)
    if args.exclude_shards:
        given["exclude_shards"] = args.exclude_shards
    options = loader_options(given, state)
    with (
        _only_errors_logged(),
        get_llama3_dataloader(**_named_sources(args), **options) as loader,
    ):
        skipped = SkippedSteps()
        until: int | None = None
        if state is not None:
            loader.load_state_dict({**state, "num_micro": 0})
            skipped = SkippedSteps.of_text(state.get("skipped", ""))
            until = loader.run.step_of(Position(epoch=state["epoch"], step=state["step"]))
        if args.rank is not None and not 0 <= args.rank < loader.process_rank.world_size:
            raise UsageError(
                f"--rank is {args.rank}, the ranks are 0 to {loader.process_rank.world_size - 1}"
            )
        tell = _tell_documents if args.find is None else _tell_steps
        limit = until if options.get("amend") else None
        with SeenDocuments(loader) as seen:
            asked = _Asked(args, loader, seen, state or {}, skipped, until, limit)
            (_tell_withdrawn if args.withdrawn else tell)(asked)
    return 0


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
            content = load_json(path.read_bytes())
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
    if isinstance(content, Mapping) and content.get("format") == STATE_FORMAT:
        yield content
    parts = content.values() if isinstance(content, Mapping) else content
    for part in parts if isinstance(content, (Mapping, list, tuple)) else ():
        yield from _states_in(part)


def loader_options(given: Mapping[str, Any], state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of a loader as the run's was: the state's, and what the flags say. Raises UsageError."""
    options: dict[str, Any] = {"world_size": 1}
    if state is not None:
        of_run = state.get("fingerprint", {})
        history = SizeHistory.of_fingerprint(of_run)
        if history is not None:
            options["global_batch_size"] = history.order_batch_size
            options["amend"] = history.changes or "sources" in of_run  # from the state on, where nobody asks
        names = ("seed", "shuffle", "group_by_length", "long_documents")
        options |= {name: of_run[name] for name in names if name in of_run}
        options |= {name: of_run.get(name) or None for name in ("seq_len", "max_length")}
        if group := of_run.get("split_group"):
            options["validation_fraction"] = 1 / group
        options |= {"split": of_run.get("split")} | dict(state.get("layout", {}))
    options |= given
    if "batch_size" not in options:
        if "global_batch_size" not in options:
            raise UsageError("the run's --global_batch_size is needed, or its --batch_size and --world_size")
        options["batch_size"] = max(1, options["global_batch_size"] // options["world_size"])
    return {**options, "rank": 0, "num_workers": 0, "pin_memory": False}


def _tell_documents(asked: _Asked) -> None:
    args, run, skipped = asked.args, asked.loader.run, asked.skipped
    # By default the last one that was trained.
    step = max(0, skipped.trained(asked.until or 0) - 1) if args.step is None else args.step
    order_step = skipped.order_step(step)
    if asked.limit is not None and order_step >= asked.limit:
        raise UsageError(
            f"step {step} is behind the state, which is of step {skipped.trained(asked.limit)}, and "
            "what comes then is up to the run's weights and sizes; take a later checkpoint"
        )
    at = run.position(order_step)
    samples = [each for each in asked.seen.of_step(order_step) if args.rank in (None, each.rank)]
    if args.json:
        answer = {"step": step, "epoch": at.epoch, "step_of_epoch": at.step}
        parts = [dataclasses.asdict(each) for each in samples]
        print_lines(json.dumps({**answer, "samples": parts}, default=str))
        return
    of_epoch = f"step {at.step} of {run.steps_in(at.epoch)}"
    print_lines(f"step {step}: epoch {at.epoch}, {of_epoch}, {len(samples)} samples")
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


def _tell_steps(asked: _Asked) -> None:
    args, run = asked.args, asked.loader.run
    stored, end = _stored(asked), run.first_step(args.epochs)
    if asked.limit is not None:
        end = min(end, asked.limit)
    sightings, num_stored = asked.seen.steps_of(stored, end), sum(map(len, stored.values()))
    lines = [
        {**dataclasses.asdict(each), "step": asked.trained(each.order_step)}
        for each in sightings
        if args.rank in (None, each.rank)
    ]
    if args.json:
        print_lines(json.dumps({"num_samples": num_stored, "epochs": args.epochs, "seen": lines}))
        return
    print_lines(f"{num_stored} stored samples, seen {len(lines)} times in {args.epochs} epochs:")
    for line in lines:
        at = run.position(line["order_step"])
        trained = "left out by skip" if line["step"] is None else f"step {line['step']}"
        place = f"rank {line['rank']} batch {line['batch']} row {line['row']}"
        print_lines(f"{trained} (epoch {at.epoch}, step {at.step}): {place}")


def _stored(asked: _Asked) -> dict[str, npt.NDArray[np.int64]]:
    """The stored samples of each source that --find names. Raises NotFound."""
    text = asked.args.find
    name, colon, offset = text.rpartition(":")
    if colon and offset.isdigit() and name:
        stored = asked.seen.stored_at(name, int(offset))
    else:
        stored = {
            name: _with_text(asked.loader, source.shards, text) for name, source in asked.seen.sources.items()
        }
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


def _tell_withdrawn(asked: _Asked) -> None:
    args, seen, skipped, state = asked.args, asked.seen, asked.skipped, asked.state
    history = ListHistory.of_text(state.get("withdrawn", ""))
    until = (asked.until or 0) + (state["num_micro"] > 0)
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
                steps = {asked.trained(one.order_step) for one in sightings if args.rank in (None, one.rank)}
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
