"""``export``: write the token ids in the layouts of Megatron, nanoGPT and Hugging Face datasets.

The files of a shard appear whole or not at all, so a stopped export can be continued. ``finish`` writes the
files that list all shards.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from preprocess.make.token_ids import Ids
from preprocess.read.formats import Numbers
from shardprep import files, publishing
from shardprep.command_line import needs
from shardprep.console import counted, print_lines, with_progress
from shardprep.errors import BrokenShard, CannotWrite, ReadWriteError, Refused, UsageError
from shardprep.format.data_folder import DataFolder
from shardprep.format.done import done_manifests
from shardprep.format.json_files import load_json
from shardprep.format.plan import Plan, need_plan
from shardprep.format.shard_samples import ShardSamples
from shardprep.output_folder import OutputFolder

_SETTINGS = "export.json"  # the mark of the folder
_STREAM = "train.bin"  # of nanoGPT
_MEGATRON_HEAD = struct.Struct("<9sQBQQ")  # of an .idx, see Megatron
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream
_WRITTEN = re.compile(
    r"export\.json|data_args\.txt|train\.bin|dataset_info\.json|state\.json"
    r"|shard-[0-9]{5}(_document\.(bin|idx)|\.bin\.partial)|data-[0-9]{5}-of-[0-9]{5}\.arrow"
)


class ExportedShard(NamedTuple):
    """The exported ids of a shard."""

    documents: Numbers  # int64[documents]: tokens of each document
    rows: Numbers  # int64[rows]: tokens of each packed row, or of each document if there are no rows
    pieces: Iterator[Ids]  # all ids in order, as arrays uint32[tokens]


class WholeDocuments:
    """The documents of rows that ``--pack best_fit`` made, each in one piece.

    A document longer than a row fills a row, and its rest follows in later rows, in order, with other
    documents between them. These rows begin without a start of a document, and have its place in the idx.
    Each is read when its document is written, in a read of its own.
    """

    def __init__(self, samples: ShardSamples) -> None:
        """Read where documents begin. Raises BrokenShard if the beginning of a document is missing."""
        self._samples = samples
        self._num_continued: list[int] = []  # of each row: the first tokens that continue a document
        self._rest_of: dict[int, list[int]] = {}  # row that a long document fills -> rows with its rest
        lengths: list[int] = []
        position_of_row: dict[int, int] = {}  # row that begins with a document -> its number in ``lengths``
        row_of_place: dict[tuple[int, int], int] = {}  # place of a document -> row that begins with it
        places = zip(
            samples.records["input_number"].tolist(), samples.records["input_offset"].tolist(), strict=True
        )
        for row, (place, num_tokens) in enumerate(
            zip(places, samples.records["num_tokens"].tolist(), strict=True)
        ):
            starts = samples.starts(row).tolist()
            num_continued = starts[0] if starts else num_tokens
            self._num_continued.append(num_continued)
            if num_continued:
                first = row_of_place.get(place)
                if first is None:
                    found = f"row {row} continues a document that no row before it fills"
                    raise BrokenShard(path=samples.path, found=found)
                self._rest_of.setdefault(first, []).append(row)
                lengths[position_of_row[first]] += num_continued
            elif starts == [0]:
                row_of_place[place] = row
                position_of_row[row] = len(lengths)
            bounds = [*starts, num_tokens]
            lengths += [end - begin for begin, end in itertools.pairwise(bounds)]
        self.lengths = np.array(lengths, np.int64)

    def pieces(self) -> Iterator[Ids]:
        """Yield the ids of all documents in the order of ``lengths``: uint32[tokens]."""
        num_tokens = self._samples.records["num_tokens"].tolist()
        row = 0
        for ids in self._samples.pieces():  # of whole rows
            begin = 0
            while begin < len(ids):
                end = begin + num_tokens[row]
                yield ids[begin + self._num_continued[row] : end]
                for later in self._rest_of.get(row, ()):
                    yield self._samples.ids(later)[: self._num_continued[later]]
                begin = end
                row += 1


class ExportLayout:
    """The files that another tool reads. A shard is done once all its files exist, and none was cut."""

    last_name = ""  # of a shard's last file, with ``number`` of the shard and ``num_shards``
    has_documents = True  # each in one piece; else rows as they are
    two_bytes_below = 1 << 16  # ids of a smaller vocabulary are uint16
    wide = "<i4"  # the type of other ids

    def __init__(self, folder: OutputFolder, vocab_size: int, num_tokens: list[int]) -> None:
        self.folder = folder
        self.num_tokens = num_tokens  # of each shard, with added EOS
        num_shards = len(num_tokens)
        self.dtype = np.dtype("<u2" if vocab_size < self.two_bytes_below else self.wide)
        self.last_names = [
            self.last_name.format(number=number, num_shards=num_shards) for number in range(num_shards)
        ]

    def is_done(self, shard_id: int) -> bool:
        return self.folder.size_of(self.last_names[shard_id]) == self.ids_bytes(shard_id)

    def ids_bytes(self, shard_id: int) -> int:
        """Return the size of a shard's ids."""
        return self.num_tokens[shard_id] * self.dtype.itemsize

    def contents(self, name: str, samples: ExportedShard) -> Iterator[tuple[str, Iterable[bytes]]]:
        """Yield the name of each file of a shard, and its bytes in pieces. ``name`` is the last one's."""
        yield name, (ids.astype(self.dtype).tobytes() for ids in samples.pieces)

    def write(self, shard_id: int, samples: ExportedShard) -> None:
        """Write the files of a shard. Raises CannotWrite, ReadWriteError and what reading raises."""
        with contextlib.ExitStack() as stack:
            written: list[publishing.PublishedFile] = []
            for name, pieces in self.contents(self.last_names[shard_id], samples):
                file = stack.enter_context(self.folder.new_file(name))
                written.append(file)
                for piece in pieces:
                    file.write(piece)
                file.sync()
            for file in written:
                file.publish()
                self.folder.sync()  # after a power cut no file may be there without those before it

    def finish(self) -> str:
        """Write the files that list all shards, and return how the tool opens them."""
        raise NotImplementedError


class Megatron(ExportLayout):
    """A .bin of ids and an .idx per shard, as megatron-core's IndexedDataset reads them.

    .idx: ``MMIDIDX`` and two zero bytes, version u64, code of the id's type u8, sequences u64, documents + 1
    u64; lengths i32[sequences], byte offsets i64[sequences], the first sequence of each document and their
    number i64[documents + 1]. Ids are uint16 below a vocabulary of 65,500, as Megatron has it, else int32.
    """

    last_name = "shard-{number:05d}_document.idx"
    two_bytes_below = 65_500

    def is_done(self, shard_id: int) -> bool:
        if self.folder.size_of(self._bin_name(shard_id)) != self.ids_bytes(shard_id):
            return False
        name = self.last_names[shard_id]
        head = self.folder.read_beginning(name, _MEGATRON_HEAD.size)
        if len(head) != _MEGATRON_HEAD.size:
            return False
        *_, num, num_ends = _MEGATRON_HEAD.unpack(head)
        return self.folder.size_of(name) == len(head) + 12 * num + 8 * num_ends

    def _bin_name(self, shard_id: int) -> str:
        return self.last_names[shard_id].removesuffix(".idx") + ".bin"

    def contents(self, name: str, samples: ExportedShard) -> Iterator[tuple[str, Iterable[bytes]]]:
        yield from super().contents(name.removesuffix(".idx") + ".bin", samples)
        size = self.dtype.itemsize
        lengths = samples.documents
        code = 8 if size == 2 else 4
        num = len(lengths)
        offsets = (np.cumsum(lengths) - lengths) * size
        head = _MEGATRON_HEAD.pack(b"MMIDIDX\x00\x00", 1, code, num, num + 1)
        arrays = (lengths.astype("<i4"), offsets.astype("<i8"), np.arange(num + 1, dtype="<i8"))
        yield name, (head, *(array.tobytes() for array in arrays))

    def finish(self) -> str:
        words = []
        for number, name in zip(self.num_tokens, self.last_names, strict=True):
            if number:
                words.append(f"{number} {self.folder.path_of(name).absolute().with_suffix('')}")
        self.folder.publish("data_args.txt", " ".join(words).encode() + b"\n")
        return f"Megatron: --data-args-path {self.folder.path_of('data_args.txt')}"


class NanoGpt(ExportLayout):
    """One flat train.bin of uint16 or uint32, which nanoGPT maps with np.memmap.

    Each shard is in a file of its own until all are done, so at the end the ids take twice the space.
    """

    last_name = "shard-{number:05d}.bin.partial"
    two_bytes_below = (1 << 16) + 1
    wide = "<u4"

    def is_done(self, shard_id: int) -> bool:
        return super().is_done(shard_id) or self.folder.size_of(_STREAM) is not None

    def finish(self) -> str:
        target = self.folder.path_of(_STREAM)
        if self.folder.size_of(_STREAM) is None:
            with self.folder.new_file(_STREAM) as file:
                for name in self.last_names:
                    self._append(file, name)
                file.sync()
                file.publish()
            self.folder.sync()
        num_bytes = self.folder.size_of(_STREAM)
        expected = sum(self.num_tokens) * self.dtype.itemsize
        if num_bytes != expected:
            again = f"{expected}; remove this file and run the export again"
            raise ReadWriteError(path=target, found=f"{num_bytes} bytes", expected=again)
        for name in self.last_names:
            with contextlib.suppress(OSError):
                self.folder.remove(name)
        return f'nanoGPT: np.memmap("{target}", dtype=np.{self.dtype.name}, mode="r")'

    def _append(self, stream: publishing.PublishedFile, name: str) -> None:
        """Append the ids of a shard to the stream of all shards."""
        with files.errors_named(self.folder.path_of(name)), self.folder.open(name) as file:
            for start in range(0, file.num_bytes, files.WRITE_BYTES):
                num_bytes = min(files.WRITE_BYTES, file.num_bytes - start)
                stream.write(memoryview(file.read(start, num_bytes)))


class HuggingFace(ExportLayout):
    """Arrow streams with a column ``input_ids`` of int32 lists, as ``datasets.load_from_disk`` reads them.

    A row is a document, or a packed row. pyarrow writes them.
    """

    last_name = "data-{number:05d}-of-{num_shards:05d}.arrow"
    has_documents = False

    def is_done(self, shard_id: int) -> bool:
        name = self.last_names[shard_id]
        size = self.folder.size_of(name)
        if size is None or size < len(_ARROW_END):
            return False
        with files.errors_named(self.folder.path_of(name)), self.folder.open(name) as file:
            return file.read_beginning(size - len(_ARROW_END), len(_ARROW_END)) == _ARROW_END

    def contents(self, name: str, samples: ExportedShard) -> Iterator[tuple[str, Iterable[bytes]]]:
        yield name, self._stream(samples)

    def _stream(self, samples: ExportedShard) -> Iterator[bytes]:
        try:
            import pyarrow as pa
        except ImportError:
            raise UsageError(needs("--to hf", "pyarrow")) from None
        schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
        yield schema.serialize().to_pybytes()
        ends = np.concatenate([[0], np.cumsum(samples.rows)])
        first = 0
        for ids in samples.pieces:  # of whole rows
            stop = int(np.searchsorted(ends, ends[first] + len(ids), side="right"))
            offsets = (ends[first:stop] - ends[first]).astype(np.int32)
            lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids.astype(np.int32)))
            yield pa.record_batch([lists], schema=schema).serialize().to_pybytes()
            first = stop - 1
        yield _ARROW_END

    def finish(self) -> str:
        features = {"input_ids": {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "Sequence"}}
        info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        state: dict[str, Any] = dict.fromkeys(("_format_columns", "_format_type", "_split"))
        state |= {"_format_kwargs": {}, "_output_all_columns": False}
        state["_data_files"] = [{"filename": name} for name in self.last_names]
        state["_fingerprint"] = self.folder.stamp_of(_SETTINGS).sha256[:16]
        self.folder.publish("dataset_info.json", json.dumps(info, indent=1).encode())
        self.folder.publish("state.json", json.dumps(state, indent=1).encode())
        return f'datasets: load_from_disk("{self.folder}")'


LAYOUTS: dict[str, type[ExportLayout]] = {"megatron": Megatron, "nanogpt": NanoGpt, "hf": HuggingFace}


def export_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the token ids of a data set in the layout of another tool. If it was stopped, run it again to "
        "continue with the missing shards."
    )
    add = parser.add_argument
    add("data_dir", metavar="DATA", type=Path, help="folder of the data set, complete")
    add("--to", required=True, choices=tuple(LAYOUTS), help="tool whose layout to write")
    add("--output_dir", type=Path, required=True, help="folder of the export")
    text = "one side of a data set that was planned with --validation_fraction (default: all documents)"
    add("--split", choices=("train", "validation"), help=text)
    text = "add EOS to documents that lack it (default for megatron and nanogpt)"
    add("--put_eos", action=argparse.BooleanOptionalAction, help=text)


def export(args: argparse.Namespace) -> int:
    """Write the missing files of an export. Raises Refused if the folder has another export."""
    folder = OutputFolder(args.output_dir, mark=_SETTINGS, writable=_WRITTEN)
    data = DataFolder(args.data_dir)
    plan = need_plan(data)
    eos = _checked_eos(
        plan, args.data_dir, args.output_dir, to=args.to, split=args.split, put_eos=args.put_eos
    )
    rows_of_shard: list[slice] = []  # the exported samples of each shard, and their tokens
    num_tokens: list[int] = []
    for manifest in done_manifests(data, plan.plan_id, range(plan.num_shards)):
        counts = manifest.counts
        held = manifest.counts.held_out
        num_train = counts.num_samples - held.num_samples
        if args.split == "validation":
            selected = slice(num_train, None)
            of_rows = held.num_tokens
            num_documents = held.num_documents
        elif args.split == "train":
            selected = slice(num_train)
            of_rows = counts.num_tokens - held.num_tokens
            num_documents = counts.num_documents - held.num_documents
        else:
            selected = slice(None)
            of_rows = counts.num_tokens
            num_documents = counts.num_documents
        rows_of_shard.append(selected)
        num_tokens.append(of_rows if eos is None else of_rows + num_documents)
    layout = LAYOUTS[args.to](folder, plan.tokenizer.vocab_size, num_tokens)
    side = {"split": args.split} if args.split else {}
    _claim(folder, {"to": args.to, "plan_id": plan.plan_id, "put_eos": eos, **side})
    todo = [shard_id for shard_id in range(plan.num_shards) if not layout.is_done(shard_id)]
    for shard_id in with_progress("exporting", todo):
        with ShardSamples(data, plan.spec, shard_id, rows_of_shard[shard_id]) as samples:
            try:
                if layout.has_documents and plan.spec.has_rows and plan.options.pack == "best_fit":
                    whole = WholeDocuments(samples)
                    stored = whole.lengths
                    pieces = whole.pieces()
                else:
                    stored = samples.document_lengths()
                    pieces = samples.pieces()
                documents = stored + (eos is not None)
                rows = samples.records["num_tokens"].astype(np.int64) if plan.spec.has_rows else documents
                pieces = _with_eos(pieces, stored, eos)
                layout.write(shard_id, ExportedShard(documents, rows, pieces))
            except (CannotWrite, ReadWriteError):
                # An equal export that was faster may have removed this one's temporary files.
                if not layout.is_done(shard_id):
                    raise
    try:
        opened_by = layout.finish()
    except (CannotWrite, ReadWriteError, FileNotFoundError):  # the other export has written the files by now
        opened_by = layout.finish()
    folder.remove_temporaries()  # left by dead attempts; a running one needs none
    sums = f"{counted(plan.num_shards, 'shard')}, {counted(sum(num_tokens), 'token')}"
    print_lines(f"{sums} in {folder}; {opened_by}")
    return 0


def _with_eos(pieces: Iterator[Ids], lengths: Numbers, eos: int | None) -> Iterator[Ids]:
    """Yield ids with EOS, if given, after each document. ``lengths`` are the tokens of the documents."""
    if eos is None:
        yield from pieces
        return
    ends = np.cumsum(lengths)
    num_ids = 0
    num_documents = 0
    for piece in pieces:
        until = int(np.searchsorted(ends, num_ids + len(piece), side="right"))
        yield np.insert(piece, ends[num_documents:until] - num_ids, eos)
        num_ids += len(piece)
        num_documents = until


def _checked_eos(
    plan: Plan, data_dir: Path, output_dir: Path, *, to: str, split: str | None, put_eos: bool | None
) -> int | None:
    """Return the id to add to each document, or None. Raises UsageError, Refused for what tools misread."""
    if plan.options.is_chat:
        expected = "texts: the layouts of other tools have no loss mask, so users' words would be trained on"
        raise UsageError(path=data_dir, found="conversations", expected=expected)
    if plan.options.blanked:
        found = "blanked documents, whose ids no other tool knows"
        advice = "plan the input again without them: --exclude takes the list that blank --ids took"
        raise Refused(path=data_dir, found=found, expected="none", advice=advice, remedy="--exclude")
    folder = output_dir.absolute()
    if to == "megatron" and any(map(str.isspace, str(folder))):
        expected = "a path without it, as Megatron splits its list of data sets there"
        raise UsageError(path=folder, found="white space", expected=expected)
    if split and not plan.options.validation_fraction:
        remedy = "--validation_fraction"
        expected = f"none, as it was planned without {remedy}"
        raise UsageError(path=data_dir, found="--split", expected=expected, remedy=remedy)
    if plan.spec.has_rows and put_eos and not plan.options.append_eos:
        raise UsageError("--put_eos is for documents; these rows were packed with --no-append_eos")
    # In a stream only EOS separates documents.
    is_wanted = to in ("megatron", "nanogpt") if put_eos is None else put_eos
    if not is_wanted or plan.options.append_eos or plan.spec.has_rows:
        return None
    if plan.tokenizer.eos_token_id is None:
        raise UsageError("the tokenizer has no EOS to add to documents; use --no-put_eos")
    return plan.tokenizer.eos_token_id


def _claim(folder: OutputFolder, settings: dict[str, Any]) -> None:
    """Record the settings of the export in its folder. Raises Refused if the folder has another one."""
    try:
        folder.claim(json.dumps(settings).encode())
    except Refused as error:
        previous: Any = "another"
        with contextlib.suppress(ValueError, BrokenShard, *files.NOT_THERE):
            previous = load_json(folder.read(_SETTINGS, max_bytes=1 << 20))
        if previous == "another":
            raise
        advice = "use a new folder for --output_dir"
        raise Refused(
            path=error.path, found=f"an export of {previous!r:.200}", expected=settings, advice=advice
        ) from None
    except (CannotWrite, ReadWriteError):
        # An equal export that was faster may have removed this one's temporary file at any time.
        if folder.size_of(_SETTINGS) is None:
            raise
