"""``export``: the token ids in the layouts of Megatron, nanoGPT and Hugging Face datasets.

An exporter writes the files of one shard whole or not at all, so that an export that was stopped goes on with
the shards that are missing; ``finish`` writes what names them all.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from preprocess.make.engines import Ids, Numbers
from shardprep.command_line import needs
from shardprep.console import Progress, counted, print_lines, quoted
from shardprep.errors import BrokenShard, CannotWrite, ReadWriteError, Refused, UsageError
from shardprep.files import (
    NOT_THERE,
    TEMPORARY_NAME,
    PublishedFile,
    make_folder,
    names_in,
    publish_bytes,
    read_regular,
    remove_tree,
    size_of_file,
    sync_folder,
)
from shardprep.format.done import Finding, check_done, read_findings
from shardprep.format.json_files import load_json
from shardprep.format.names import shard_name
from shardprep.format.plan import Plan, need_plan
from shardprep.format.shards import ShardSamples
from shardprep.format.withdrawals import read_withdrawals

_ARROW_ROWS_TOKENS = 1 << 20  # tokens of a record batch, about
_SETTINGS = "export.json"
STREAMS: Sequence[str] = ("megatron", "nanogpt")  # of which documents are told apart by EOS alone


@dataclass(frozen=True, kw_only=True)
class ShardTokens:
    """What an exporter is given of a shard."""

    samples: ShardSamples
    stored_lengths: Numbers  # tokens of each document in the shard: int64[documents]
    put_eos: int | None  # behind each document; None where the shards have it, or it is not wanted

    def document_lengths(self) -> Numbers:
        """Tokens of each document, as ``pieces`` has them: int64[documents]."""
        return self.stored_lengths + (self.put_eos is not None)

    def row_lengths(self) -> Numbers:
        """Tokens of each stored row; where there are none, of each document."""
        if self.samples.spec.seq_len:
            return self.samples.records["num_tokens"].astype(np.int64)
        return self.document_lengths()

    def pieces(self) -> Iterator[Ids]:
        """All ids in order, some at a time: uint32[tokens] arrays."""
        if self.put_eos is None:
            yield from self.samples.pieces()
            return
        ends = np.cumsum(self.stored_lengths)
        done = told = 0  # ids, documents
        for piece in self.samples.pieces():
            until = int(np.searchsorted(ends, done + len(piece), side="right"))
            yield np.insert(piece, ends[told:until] - done, self.put_eos)
            done, told = done + len(piece), until

    def groups(self) -> Iterator[tuple[Numbers, Ids]]:
        """Rows in groups of about _ARROW_ROWS_TOKENS: their lengths, and their ids."""
        lengths, pieces, held = self.row_lengths(), self.pieces(), np.empty(0, np.uint32)
        bounds = np.flatnonzero(np.diff(np.cumsum(lengths) // _ARROW_ROWS_TOKENS)) + 1
        for of_group in np.split(lengths, bounds) if len(lengths) else []:
            num_ids, parts = int(of_group.sum()), [held]
            while sum(map(len, parts)) < num_ids:
                parts.append(next(pieces))
            joined = np.concatenate(parts)
            yield of_group, joined[:num_ids]
            held = joined[num_ids:]


@dataclass(kw_only=True)
class Exporter:
    """Writes shards of one data set into ``folder``; see its three kinds below."""

    folder: Path
    vocab_size: int
    num_shards: int
    first_token: list[int]  # where each shard begins in the whole stream, EOS included; num_shards + 1

    def last_file(self, shard_id: int) -> Path:
        """Return the file of a shard that gets its name last."""
        raise NotImplementedError

    def is_done(self, shard_id: int) -> bool:
        """Whether the files of a shard are there."""
        return size_of_file(self.last_file(shard_id)) is not None

    def write(self, shard: ShardTokens) -> None:
        """Write the files of a shard. Raises CannotWrite, ReadWriteError and what reading raises."""
        raise NotImplementedError

    def finish(self) -> str:
        """Write what names all shards, and return how the tool opens them."""
        raise NotImplementedError


@contextlib.contextmanager
def _published(*paths: Path) -> Iterator[list[PublishedFile]]:
    """Files that are given their names together, in order, if nothing fails within."""
    files: list[PublishedFile] = []
    try:
        files.extend(map(PublishedFile, paths))
        yield files
        for file in files:
            file.sync()
        for file in files:
            file.publish()
    finally:
        for file in files:
            file.discard()
    sync_folder(paths[0].parent)


class Megatron(Exporter):
    """A .bin of ids and an .idx per shard, as megatron-core's IndexedDataset reads them.

    .idx: ``MMIDIDX`` and two zero bytes, version u64, code of the id's type u8, sequences u64, documents + 1
    u64; lengths i32[sequences], byte offsets i64[sequences], the first sequence of each document and their
    number i64[documents + 1]. Ids are uint16 below a vocabulary of 65,500, as Megatron has it, else int32.
    """

    def last_file(self, shard_id: int) -> Path:
        return self.folder / f"{shard_name(shard_id)}_document.idx"

    def write(self, shard: ShardTokens) -> None:
        dtype = np.dtype("<u2" if self.vocab_size < 65_500 else "<i4")
        lengths = shard.document_lengths()
        offsets = (np.cumsum(lengths) - lengths) * dtype.itemsize
        head = struct.pack(
            "<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8 if dtype.itemsize == 2 else 4, len(lengths), len(lengths) + 1
        )
        path = self.last_file(shard.samples.shard_id)
        with _published(path.with_suffix(".bin"), path) as (ids, idx):
            for piece in shard.pieces():
                ids.write(piece.astype(dtype).tobytes())
            parts = (lengths.astype("<i4"), offsets.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8"))
            idx.write(head + b"".join(part.tobytes() for part in parts))

    def finish(self) -> str:
        words = [
            f"{end - begin} {self.last_file(shard_id).with_suffix('').absolute()}"
            for shard_id, (begin, end) in enumerate(itertools.pairwise(self.first_token))
            if end > begin
        ]
        publish_bytes(self.folder / "data_args.txt", " ".join(words).encode() + b"\n")
        return f"Megatron: --data-args-path {self.folder / 'data_args.txt'}"


@dataclass(kw_only=True)
class NanoGpt(Exporter):
    """One flat train.bin of uint16 or uint32, which nanoGPT maps with np.memmap.

    Shards are written into their place of a file that gets its name at the end; an empty file in ``.done``
    says that one is there.
    """

    def __post_init__(self) -> None:
        self._target, self._partial = self.folder / "train.bin", self.folder / "train.bin.partial"
        self._dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def last_file(self, shard_id: int) -> Path:
        return self.folder / ".done" / shard_name(shard_id)

    def is_done(self, shard_id: int) -> bool:
        if size_of_file(self._target) is not None:
            return True
        return super().is_done(shard_id) and size_of_file(self._partial) is not None

    def write(self, shard: ShardTokens) -> None:
        mark = self.last_file(shard.samples.shard_id)
        try:
            mark.parent.mkdir(exist_ok=True)
            handle = os.open(self._partial, os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError as error:
            raise CannotWrite(f"{self._partial} cannot be made: {error.strerror}") from None
        try:
            with os.fdopen(handle, "wb") as file:
                file.seek(self.first_token[shard.samples.shard_id] * self._dtype.itemsize)
                for piece in shard.pieces():
                    file.write(piece.astype(self._dtype).tobytes())
                file.flush()
                os.fsync(handle)
        except OSError as error:
            raise ReadWriteError(
                f"{self._partial} cannot be written: {error.strerror}; run this again"
            ) from None
        publish_bytes(mark, b"")

    def finish(self) -> str:
        if size_of_file(self._target) is None:
            try:
                self._partial.rename(self._target)
                sync_folder(self.folder)
            except FileNotFoundError:  # an equal export, at the same time, has renamed it
                if size_of_file(self._target) is None:
                    raise ReadWriteError(f"{self._partial} went meanwhile; run this again") from None
            except OSError as error:
                raise ReadWriteError(f"{self._target} cannot be put in its place: {error.strerror}") from None
        found, expected = size_of_file(self._target), self.first_token[-1] * self._dtype.itemsize
        if found != expected:
            raise ReadWriteError(
                f"{self._target} has {found} of {expected} bytes; remove it and run this again"
            )
        with contextlib.suppress(OSError):  # temporaries may be there, of attempts that died
            remove_tree(self.last_file(0).parent)
        with contextlib.suppress(OSError):  # which an equal export began after this one's was renamed
            self._partial.unlink()
        return f'nanoGPT: np.memmap("{self._target}", dtype=np.{self._dtype.name}, mode="r")'


class HuggingFace(Exporter):
    """Arrow files with a column ``input_ids`` of int32 lists, as ``datasets.load_from_disk`` reads them.

    A row is a document, or a packed row. pyarrow writes them.
    """

    def last_file(self, shard_id: int) -> Path:
        return self.folder / f"data-{shard_id:05d}-of-{self.num_shards:05d}.arrow"

    def write(self, shard: ShardTokens) -> None:
        try:
            import pyarrow as pa
        except ImportError:
            raise UsageError(needs("--to hf", "pyarrow")) from None
        schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
        with (
            _published(self.last_file(shard.samples.shard_id)) as (file,),
            pa.ipc.new_stream(_Sink(file), schema) as stream,
        ):
            for lengths, ids in shard.groups():
                ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
                rows = pa.ListArray.from_arrays(pa.array(ends), pa.array(ids.astype(np.int32)))
                stream.write_batch(pa.record_batch([rows], schema=schema))

    def finish(self) -> str:
        features = {"input_ids": {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "Sequence"}}
        info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": [{"filename": self.last_file(number).name} for number in range(self.num_shards)],
            "_fingerprint": hashlib.sha256(str(self.first_token).encode()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        publish_bytes(self.folder / "dataset_info.json", json.dumps(info, indent=1).encode())
        publish_bytes(self.folder / "state.json", json.dumps(state, indent=1).encode())
        return f'datasets: load_from_disk("{self.folder}")'


class _Sink(io.RawIOBase):
    """A file for pyarrow to write to."""

    def __init__(self, file: PublishedFile) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.write(view)
        return view.nbytes


EXPORTERS: dict[str, type[Exporter]] = {"megatron": Megatron, "nanogpt": NanoGpt, "hf": HuggingFace}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the token ids of a data set in the layout of another tool. Run it again after it was stopped: "
        "it goes on with the shards that are missing."
    )
    add = parser.add_argument
    add("data_dir", type=Path, help="folder of the data set, complete")
    add("--to", required=True, choices=tuple(EXPORTERS), help="tool whose layout to write")
    add("--output_dir", type=Path, required=True, help="folder of the export")
    text = "one side of a data set that was planned with --validation_fraction (default: all documents)"
    add("--split", choices=("train", "validation"), help=text)
    text = "put EOS behind documents that lack it (default for megatron and nanogpt)"
    add("--put_eos", action=argparse.BooleanOptionalAction, help=text)


def export(args: argparse.Namespace) -> int:
    """``export DATA``: write what is missing. Raises Refused where the folder has another export."""
    folder: Path = args.output_dir
    plan = need_plan(args.data_dir)
    if plan.options.is_chat:
        raise UsageError(
            f"{args.data_dir} holds conversations, and no other tool's layout keeps their loss mask: their "
            "users' words would be trained on; read them with the loader"
        )
    if args.to == "megatron" and any(map(str.isspace, str(folder.absolute()))):
        raise UsageError(
            f"--output_dir {str(folder.absolute())!r} has white space in it, at which Megatron cuts the "
            "lists of its data sets; choose a folder without it",
            path=folder.absolute(),
            found="white space",
            expected="a folder without it",
        )
    if args.split and not plan.options.validation_fraction:
        raise UsageError(
            f"--split is given, and {args.data_dir} was planned without --validation_fraction; leave it out, "
            "or plan anew with a fraction",
            path=args.data_dir,
            found="--split",
            remedy="--validation_fraction",
        )
    if read_withdrawals(args.data_dir, plan.plan_id).lists:
        raise Refused(
            f"documents of {args.data_dir} are withdrawn, and no other tool reads the lists; make a data set "
            f"without them, and export that: shardprep rewrite {quoted(args.data_dir)} --output_dir NEW"
        )
    put_eos = _eos_to_put(plan, args)
    findings = read_findings(args.data_dir, plan.plan_id)
    parts = [_part_of(args, plan, shard_id, findings) for shard_id in range(plan.num_shards)]
    ends = itertools.accumulate(
        num_tokens + (put_eos is not None) * num_documents for _, num_documents, num_tokens in parts
    )
    exporter = EXPORTERS[args.to](
        folder=folder,
        vocab_size=plan.tokenizer.vocab_size,
        num_shards=plan.num_shards,
        first_token=[0, *ends],
    )
    side = {"split": args.split} if args.split else {}
    _claim(folder, {"to": args.to, "plan_id": plan.plan_id, "put_eos": put_eos, **side})
    todo = [shard_id for shard_id in range(plan.num_shards) if not exporter.is_done(shard_id)]
    with Progress("exporting", len(todo), unit="shards") as progress:
        for shard_id in todo:
            with ShardSamples(args.data_dir, plan.spec, shard_id, parts[shard_id][0]) as samples:
                lengths = samples.document_lengths(rows_hold_wholes=plan.options.pack == "best_fit")
                try:
                    exporter.write(ShardTokens(samples=samples, stored_lengths=lengths, put_eos=put_eos))
                except (CannotWrite, ReadWriteError):
                    # An equal export at the same time, that was faster, has removed this one's temporaries.
                    if not exporter.is_done(shard_id):
                        raise
            progress.add(1)
    opened_by = exporter.finish()
    with contextlib.suppress(OSError):  # of attempts that died; whatever a living one would write is there
        for path in [item for item in folder.iterdir() if TEMPORARY_NAME.fullmatch(item.name)]:
            remove_tree(path)
    shards = counted(plan.num_shards, "shard")
    print_lines(f"{shards}, {exporter.first_token[-1]} tokens in {folder}; {opened_by}")
    return 0


def _part_of(
    args: argparse.Namespace, plan: Plan, shard_id: int, findings: Mapping[int, Finding]
) -> tuple[slice, int, int]:
    """What of a shard is exported: samples, and how many documents and tokens they have."""
    counts = check_done(args.data_dir, shard_id, plan.plan_id, findings).counts
    num_documents, num_tokens, held = counts.num_documents, counts.num_tokens, counts.validation
    if not args.split or held is None:
        return slice(None), num_documents, num_tokens
    cut = counts.num_samples - held.num_samples
    if args.split == "validation":
        return slice(cut, None), held.num_documents, held.num_tokens
    return slice(cut), num_documents - held.num_documents, num_tokens - held.num_tokens


def _eos_to_put(plan: Plan, args: argparse.Namespace) -> int | None:
    wanted = args.to in STREAMS if args.put_eos is None else args.put_eos
    if not wanted or plan.options.append_eos:
        return None
    if plan.spec.has_rows:
        if args.put_eos:
            raise UsageError("--put_eos is for documents; these rows were packed with --no-append_eos")
        return None
    eos = plan.tokenizer.eos_token_id
    if eos is None:
        raise UsageError("the tokenizer names no EOS to put behind documents; add --no-put_eos")
    return eos


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Say whose export the folder is, once; of two at the same time the first one does.

    Raises Refused where it is another's, CannotWrite, ReadWriteError.
    """
    path = folder / _SETTINGS
    try:
        if size_of_file(path) is None:
            make_folder(folder, parents=True)
            others = [name for name in names_in(folder) if not TEMPORARY_NAME.fullmatch(name)]
            if others and _SETTINGS not in others:
                raise Refused(
                    f"--output_dir {folder} holds {others[0]} and no {_SETTINGS}; choose a fresh folder",
                    path=folder,
                    found=others[0],
                    expected="a fresh folder",
                )
            with PublishedFile(path) as file:
                file.write(json.dumps(settings).encode())
                file.sync()
                file.publish_first()
            sync_folder(folder)
        found = load_json(read_regular(path, max_bytes=1 << 20))
    except NOT_THERE:
        raise ReadWriteError(f"{path} went meanwhile; run this again") from None
    except (ValueError, BrokenShard):
        found = None
    there = found if isinstance(found, dict) else {}
    names = {**settings, **there}
    if differing := ", ".join(name for name in names if there.get(name) != settings.get(name)):
        raise Refused(
            f"--output_dir {folder} holds another export: {differing} differ; choose a fresh folder"
        )
