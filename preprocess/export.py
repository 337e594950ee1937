"""``export``: write the token ids in the layouts of Megatron, nanoGPT and Hugging Face datasets.

The files of a shard appear whole or not at all, so a stopped export can be continued. ``finish`` writes the
files that list all shards.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from preprocess.make.engines import Ids
from preprocess.read.documents import Numbers
from shardprep import files
from shardprep.command_line import needs
from shardprep.console import counted, print_lines, with_progress
from shardprep.errors import BrokenShard, CannotWrite, ReadWriteError, Refused, UsageError
from shardprep.format.data_folder import DataFolder
from shardprep.format.index import ShardSamples
from shardprep.format.manifest import done_manifests
from shardprep.format.names import load_json
from shardprep.format.plan import Plan, need_plan

_SETTINGS = "export.json"


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
            samples.records["source"].tolist(), samples.records["source_offset"].tolist(), strict=True
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
    """The files that another tool reads. A shard is done once the last one of its files exists."""

    last_name = ""  # of that file, with ``number`` of the shard and ``num_shards``
    has_documents = True  # each in one piece; else rows as they are
    two_bytes_below, wide = 1 << 16, "<i4"  # ids of a smaller vocabulary are uint16, others of this type

    def __init__(self, folder: Path, vocab_size: int, num_tokens: list[int]) -> None:
        self.folder, self.num_tokens, num_shards = folder, num_tokens, len(num_tokens)  # with added EOS
        self.dtype = np.dtype("<u2" if vocab_size < self.two_bytes_below else self.wide)
        names = (self.last_name.format(number=number, num_shards=num_shards) for number in range(num_shards))
        self.last_files = [folder / name for name in names]

    def is_done(self, shard_id: int) -> bool:
        return files.size_of_file(self.last_files[shard_id]) is not None

    def contents(self, path: Path, samples: ExportedShard) -> Iterator[tuple[Path, Iterable[bytes]]]:
        """Yield the path of each file of a shard, and its bytes in pieces. ``path`` is the last one's."""
        yield path, (ids.astype(self.dtype).tobytes() for ids in samples.pieces)

    def write(self, shard_id: int, samples: ExportedShard) -> None:
        """Write the files of a shard. Raises CannotWrite, ReadWriteError and what reading raises."""
        with contextlib.ExitStack() as stack:
            written: list[files.PublishedFile] = []
            for path, pieces in self.contents(self.last_files[shard_id], samples):
                written.append(stack.enter_context(files.PublishedFile(path)))
                for piece in pieces:
                    written[-1].write(piece)
                written[-1].sync()
            for file in written:
                file.publish()
        files.sync_folder(self.folder)

    def finish(self) -> str:
        """Write the files that list all shards, and return how the tool opens them."""
        raise NotImplementedError


class Megatron(ExportLayout):
    """A .bin of ids and an .idx per shard, as megatron-core's IndexedDataset reads them.

    .idx: ``MMIDIDX`` and two zero bytes, version u64, code of the id's type u8, sequences u64, documents + 1
    u64; lengths i32[sequences], byte offsets i64[sequences], the first sequence of each document and their
    number i64[documents + 1]. Ids are uint16 below a vocabulary of 65,500, as Megatron has it, else int32.
    """

    last_name, two_bytes_below = "shard-{number:05d}_document.idx", 65_500

    def contents(self, path: Path, samples: ExportedShard) -> Iterator[tuple[Path, Iterable[bytes]]]:
        yield from super().contents(path.with_suffix(".bin"), samples)
        size, lengths = self.dtype.itemsize, samples.documents
        code, num = (8 if size == 2 else 4), len(lengths)
        offsets = (np.cumsum(lengths) - lengths) * size
        head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, num, num + 1)
        arrays = (lengths.astype("<i4"), offsets.astype("<i8"), np.arange(num + 1, dtype="<i8"))
        yield path, (head, *(array.tobytes() for array in arrays))

    def finish(self) -> str:
        pairs = zip(self.num_tokens, self.last_files, strict=True)
        words = [f"{number} {path.absolute().with_suffix('')}" for number, path in pairs if number]
        files.publish_bytes(self.folder / "data_args.txt", " ".join(words).encode() + b"\n")
        return f"Megatron: --data-args-path {self.folder / 'data_args.txt'}"


class NanoGpt(ExportLayout):
    """One flat train.bin of uint16 or uint32, which nanoGPT maps with np.memmap.

    Each shard is in a file of its own until all are done, so at the end the ids take twice the space.
    """

    last_name, two_bytes_below, wide = "shard-{number:05d}.bin.partial", (1 << 16) + 1, "<u4"

    def is_done(self, shard_id: int) -> bool:
        return super().is_done(shard_id) or files.size_of_file(self.folder / "train.bin") is not None

    def finish(self) -> str:
        target = self.folder / "train.bin"
        if files.size_of_file(target) is None:
            with files.PublishedFile(target) as file:
                for path in self.last_files:
                    with files.errors_named(path):
                        file.write_file(path)
                file.sync()
                file.publish()
            files.sync_folder(self.folder)
        found, expected = files.size_of_file(target), sum(self.num_tokens) * self.dtype.itemsize
        if found != expected:
            again = f"{expected}; remove this file and run the export again"
            raise ReadWriteError(path=target, found=f"{found} bytes", expected=again)
        for path in self.last_files:
            with contextlib.suppress(OSError):
                path.unlink()
        return f'nanoGPT: np.memmap("{target}", dtype=np.{self.dtype.name}, mode="r")'


class HuggingFace(ExportLayout):
    """Arrow streams with a column ``input_ids`` of int32 lists, as ``datasets.load_from_disk`` reads them.

    A row is a document, or a packed row. pyarrow writes them.
    """

    last_name, has_documents = "data-{number:05d}-of-{num_shards:05d}.arrow", False

    def contents(self, path: Path, samples: ExportedShard) -> Iterator[tuple[Path, Iterable[bytes]]]:
        yield path, self._stream(samples)

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
        yield b"\xff\xff\xff\xff\0\0\0\0"  # the end of an Arrow stream

    def finish(self) -> str:
        features = {"input_ids": {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "Sequence"}}
        info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        state: dict[str, Any] = dict.fromkeys(("_format_columns", "_format_type", "_split"))
        state |= {"_format_kwargs": {}, "_output_all_columns": False}
        state["_data_files"] = [{"filename": path.name} for path in self.last_files]
        state["_fingerprint"] = files.stamp_file(self.folder / _SETTINGS).sha256[:16]
        files.publish_bytes(self.folder / "dataset_info.json", json.dumps(info, indent=1).encode())
        files.publish_bytes(self.folder / "state.json", json.dumps(state, indent=1).encode())
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
    folder: Path = args.output_dir
    data = DataFolder(args.data_dir)
    plan = need_plan(data)
    eos = _checked_eos(args, plan)
    parts: list[slice] = []  # the exported samples of each shard, and their tokens
    num_tokens: list[int] = []
    for manifest in done_manifests(data, plan.plan_id, range(plan.num_shards)):
        counts, held = manifest.counts, manifest.counts.held_out
        num_train = counts.num_samples - held.num_samples
        part, num_part, num_documents = slice(None), counts.num_tokens, counts.num_documents
        if args.split == "validation":
            part, num_part, num_documents = slice(num_train, None), held.num_tokens, held.num_documents
        elif args.split == "train":
            part = slice(num_train)
            num_part, num_documents = num_part - held.num_tokens, num_documents - held.num_documents
        parts.append(part)
        num_tokens.append(num_part if eos is None else num_part + num_documents)
    layout = LAYOUTS[args.to](folder, plan.tokenizer.vocab_size, num_tokens)
    side = {"split": args.split} if args.split else {}
    _claim(folder, {"to": args.to, "plan_id": plan.plan_id, "put_eos": eos, **side})
    todo = [shard_id for shard_id in range(plan.num_shards) if not layout.is_done(shard_id)]
    for shard_id in with_progress("exporting", todo):
        with ShardSamples(data, plan.spec, shard_id, parts[shard_id]) as samples:
            try:
                if layout.has_documents and plan.spec.has_rows and plan.options.pack == "best_fit":
                    whole = WholeDocuments(samples)
                    stored, pieces = whole.lengths, whole.pieces()
                else:
                    stored, pieces = samples.document_lengths(), samples.pieces()
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
    with contextlib.suppress(OSError, ReadWriteError):  # left by dead attempts; a running one needs none
        for name in filter(files.TEMPORARY_NAME.fullmatch, files.names_in(folder)):
            files.remove_tree(folder / name)
    sums = f"{counted(plan.num_shards, 'shard')}, {counted(sum(num_tokens), 'token')}"
    print_lines(f"{sums} in {folder}; {opened_by}")
    return 0


def _with_eos(pieces: Iterator[Ids], lengths: Numbers, eos: int | None) -> Iterator[Ids]:
    """Yield ids with EOS, if given, after each document. ``lengths`` are the tokens of the documents."""
    if eos is None:
        yield from pieces
        return
    ends, num_ids, num_documents = np.cumsum(lengths), 0, 0
    for piece in pieces:
        until = int(np.searchsorted(ends, num_ids + len(piece), side="right"))
        yield np.insert(piece, ends[num_documents:until] - num_ids, eos)
        num_ids, num_documents = num_ids + len(piece), until


def _checked_eos(args: argparse.Namespace, plan: Plan) -> int | None:
    """Return the id to add to each document, or None. Raises UsageError, Refused for what tools misread."""
    if plan.options.is_chat:
        expected = "texts: the layouts of other tools have no loss mask, so users' words would be trained on"
        raise UsageError(path=args.data_dir, found="conversations", expected=expected)
    if plan.options.blanked:
        found = "blanked documents, whose ids no other tool knows"
        advice = "plan the input again without them: --exclude takes the list that blank --ids took"
        raise Refused(path=args.data_dir, found=found, expected="none", advice=advice, remedy="--exclude")
    folder = args.output_dir.absolute()
    if args.to == "megatron" and any(map(str.isspace, str(folder))):
        expected = "a path without it, as Megatron splits its list of data sets there"
        raise UsageError(path=folder, found="white space", expected=expected)
    if args.split and not plan.options.validation_fraction:
        remedy = "--validation_fraction"
        expected = f"none, as it was planned without {remedy}"
        raise UsageError(path=args.data_dir, found="--split", expected=expected, remedy=remedy)
    if plan.spec.has_rows and args.put_eos and not plan.options.append_eos:
        raise UsageError("--put_eos is for documents; these rows were packed with --no-append_eos")
    # In a stream only EOS separates documents.
    is_wanted = args.to in ("megatron", "nanogpt") if args.put_eos is None else args.put_eos
    if not is_wanted or plan.options.append_eos or plan.spec.has_rows:
        return None
    if plan.tokenizer.eos_token_id is None:
        raise UsageError("the tokenizer has no EOS to add to documents; use --no-put_eos")
    return plan.tokenizer.eos_token_id


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Record the settings of the export in its folder. Raises Refused if the folder has another one."""
    path, fresh = folder / _SETTINGS, "a new folder for --output_dir"
    files.make_folder(folder, parents=True)
    there = [name for name in files.names_in(folder) if not files.TEMPORARY_NAME.fullmatch(name)]
    if there and _SETTINGS not in there:
        raise Refused(path=folder, found=f"{there[0]} but no {_SETTINGS}", expected=fresh)
    if not there:
        try:
            with files.PublishedFile(path) as file:
                file.write(json.dumps(settings).encode())
                file.sync()
                file.publish_first()  # of two exports at the same time one succeeds
        except (CannotWrite, ReadWriteError):
            # An equal export that was faster may have removed this one's temporary file at any time.
            if not path.exists():
                raise
        files.sync_folder(folder)
    found: Any = "another"
    with contextlib.suppress(ValueError, BrokenShard):
        found = load_json(files.read_regular(path, max_bytes=1 << 20))
    if found != settings:
        raise Refused(path=folder, found=f"an export of {found!r:.200}", expected=f"{settings}; use {fresh}")
