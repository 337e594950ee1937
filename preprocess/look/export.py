"""``export``: the token ids in the layouts of other tools.

The layouts of other tools, byte by byte: Megatron's indexed data set, nanoGPT's stream, Arrow, and MDS.

An exporter writes the files of one shard whole or not at all, so that an export that was stopped goes on with
the shards that are missing; ``finish`` writes what names them all.

``shardprep export O --to TOOL --output_dir E``: the shards that are missing, then what names them all.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.plan.plan_file import Plan, need_plan
from shardprep.command_line import needs
from shardprep.console import Progress, print_lines
from shardprep.errors import BrokenShard, CannotWrite, ReadWriteError, Refused, UsageError
from shardprep.files import (
    NOT_THERE,
    TEMPORARY_NAME,
    PublishedFile,
    publish_bytes,
    read_regular,
    remove_tree,
    size_of_file,
    sync_folder,
)
from shardprep.format.manifest import check_shard
from shardprep.format.names import shard_name
from shardprep.format.shards import ShardSamples

_MDS_BYTES = 64 << 20  # of one .mds file, about: their offsets are uint32
_ARROW_ROWS_TOKENS = 1 << 20  # tokens of a record batch, about


@dataclass(frozen=True, kw_only=True)
class ShardTokens:
    """What an exporter is given of a shard."""

    samples: ShardSamples
    rows_hold_wholes: bool  # --pack best_fit
    put_eos: int | None  # behind each document; None where the shards have it, or it is not wanted

    @property
    def shard_id(self) -> int:
        return self.samples.shard_id

    def lengths(self, *, of_rows: bool) -> npt.NDArray[np.int64]:
        """Tokens of each document, or of each stored row: int64[n]; what ``pieces`` gives, cut."""
        if of_rows and self.samples.spec.seq_len:
            return self.samples.records["num_tokens"].astype(np.int64)
        lengths = self.samples.document_lengths(rows_hold_wholes=self.rows_hold_wholes)
        return lengths + (self.put_eos is not None)

    def pieces(self) -> Iterator[npt.NDArray[np.uint32]]:
        """All ids in order, some at a time: uint32[tokens] arrays."""
        if self.put_eos is None:
            yield from self.samples.pieces()
            return
        ends = np.cumsum(self.samples.document_lengths(rows_hold_wholes=self.rows_hold_wholes))
        done = told = 0  # ids, documents
        for piece in self.samples.pieces():
            until = int(np.searchsorted(ends, done + len(piece), side="right"))
            yield np.insert(piece, ends[told:until] - done, self.put_eos)
            done, told = done + len(piece), until

    def sequences(self, lengths: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.uint32]]:
        """The same ids, cut into sequences of some lengths: uint32[length] arrays."""
        held = np.empty(0, np.uint32)
        pieces = self.pieces()
        for length in lengths.tolist():
            parts, have = [held], len(held)
            while have < length:
                parts.append(next(pieces))
                have += len(parts[-1])
            joined = np.concatenate(parts) if len(parts) > 1 else held
            yield joined[:length]
            held = joined[length:]


@dataclass(frozen=True, kw_only=True)
class Exporter(ABC):
    """Writes shards of one data set into ``folder``."""

    folder: Path
    vocab_size: int
    num_shards: int
    first_token: list[int]  # where each shard begins in the whole stream, EOS included; num_shards + 1

    def check_folder(self) -> None:  # noqa: B027 - most tools can open any folder
        """That the tool can open what lies in ``folder``. Raises UsageError."""

    @abstractmethod
    def is_done(self, shard_id: int) -> bool:
        """Whether the files of a shard are there."""

    @abstractmethod
    def write(self, shard: ShardTokens) -> None:
        """Write the files of a shard. Raises CannotWrite, ReadWriteError and what reading raises."""

    @abstractmethod
    def finish(self) -> str:
        """Write what names all shards; returns how the tool opens them."""


@contextmanager
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

    def check_folder(self) -> None:
        """See Exporter."""
        if any(char.isspace() for char in str(self.folder.absolute())):
            raise UsageError(
                f"--output_dir {str(self.folder.absolute())!r} has white space in it, at which Megatron cuts "
                "the lists of its data sets; choose a folder without it"
            )

    def _paths(self, shard_id: int) -> tuple[Path, Path]:
        stem = f"{shard_name(shard_id)}_document"
        return self.folder / f"{stem}.bin", self.folder / f"{stem}.idx"

    def is_done(self, shard_id: int) -> bool:
        return size_of_file(self._paths(shard_id)[1]) is not None  # named last

    def write(self, shard: ShardTokens) -> None:
        dtype = np.dtype("<u2" if self.vocab_size < 65_500 else "<i4")
        lengths = shard.lengths(of_rows=False)
        offsets = (np.cumsum(lengths) - lengths) * dtype.itemsize
        head = struct.pack(
            "<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8 if dtype.itemsize == 2 else 4, len(lengths), len(lengths) + 1
        )
        with _published(*self._paths(shard.shard_id)) as (ids, idx):
            for piece in shard.pieces():
                ids.write(piece.astype(dtype).tobytes())
            parts = (lengths.astype("<i4"), offsets.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8"))
            idx.write(head + b"".join(part.tobytes() for part in parts))

    def finish(self) -> str:
        stems = [self._paths(shard_id)[0].with_suffix("") for shard_id in range(self.num_shards)]
        weights = [b - a for a, b in itertools.pairwise(self.first_token)]
        text = " ".join(
            f"{weight} {stem.absolute()}" for weight, stem in zip(weights, stems, strict=True) if weight
        )
        publish_bytes(self.folder / "data_args.txt", text.encode() + b"\n")
        return f"Megatron: --data-args-path {self.folder / 'data_args.txt'}"


class NanoGpt(Exporter):
    """One flat train.bin of uint16 or uint32, which nanoGPT maps with np.memmap.

    Shards are written into their place of a file that gets its name at the end; an empty file in ``.done``
    says that one is there.
    """

    @property
    def _partial(self) -> Path:
        return self.folder / "train.bin.partial"

    def _mark(self, shard_id: int) -> Path:
        return self.folder / ".done" / shard_name(shard_id)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def is_done(self, shard_id: int) -> bool:
        return any(
            size_of_file(path) is not None for path in (self.folder / "train.bin", self._mark(shard_id))
        )

    def write(self, shard: ShardTokens) -> None:
        place = self.first_token[shard.shard_id] * self._dtype.itemsize
        try:
            self._mark(0).parent.mkdir(exist_ok=True)
            handle = os.open(self._partial, os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError as error:
            raise CannotWrite(f"{self._partial} cannot be made: {error.strerror}") from None
        try:
            for piece in shard.pieces():
                view = memoryview(piece.astype(self._dtype).tobytes())
                while view:
                    count = os.pwrite(handle, view, place)
                    view, place = view[count:], place + count
            os.fsync(handle)
        except OSError as error:
            raise ReadWriteError(
                f"{self._partial} cannot be written: {error.strerror}; run this again"
            ) from None
        finally:
            os.close(handle)
        publish_bytes(self._mark(shard.shard_id), b"")

    def finish(self) -> str:
        target = self.folder / "train.bin"
        if size_of_file(target) is None:
            try:
                self._partial.touch()
                self._partial.rename(target)
                sync_folder(self.folder)
            except OSError as error:
                raise ReadWriteError(f"{target} cannot be put in its place: {error.strerror}") from None
        with contextlib.suppress(OSError):  # temporaries may be there, of attempts that died
            remove_tree(self._mark(0).parent)
        return f'nanoGPT: np.memmap("{target}", dtype=np.{self._dtype.name}, mode="r")'


class HuggingFace(Exporter):
    """Arrow files with a column ``input_ids`` of int32 lists, as ``datasets.load_from_disk`` reads them.

    A row is a document, or a packed row. pyarrow writes them.
    """

    def _path(self, shard_id: int) -> Path:
        return self.folder / f"data-{shard_id:05d}-of-{self.num_shards:05d}.arrow"

    def is_done(self, shard_id: int) -> bool:
        return size_of_file(self._path(shard_id)) is not None

    def write(self, shard: ShardTokens) -> None:
        try:
            import pyarrow as pa
        except ImportError:
            raise UsageError(needs("--to hf", "pyarrow")) from None
        schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
        lengths = shard.lengths(of_rows=True)
        groups = np.cumsum(lengths) // _ARROW_ROWS_TOKENS
        sequences = shard.sequences(lengths)
        with (
            _published(self._path(shard.shard_id)) as (file,),
            pa.ipc.new_stream(_Sink(file.write), schema) as stream,
        ):
            for number in np.unique(groups).tolist():
                of_group = lengths[groups == number]
                ids = np.concatenate([np.empty(0, np.uint32), *itertools.islice(sequences, len(of_group))])
                ends = np.concatenate([[0], np.cumsum(of_group)]).astype(np.int32)
                rows = pa.ListArray.from_arrays(pa.array(ends), pa.array(ids.astype(np.int32)))
                stream.write_batch(pa.record_batch([rows], schema=schema))

    def finish(self) -> str:
        files = [{"filename": self._path(shard_id).name} for shard_id in range(self.num_shards)]
        value = {"dtype": "int32", "_type": "Value"}
        features = {"input_ids": {"feature": value, "_type": "Sequence"}}
        info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": files,
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


class _Sink:
    """A file for pyarrow to write to."""

    closed = False

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def write(self, data: Any) -> int:
        raw = bytes(data)
        self._write(raw)
        return len(raw)

    def flush(self) -> None:
        """Nothing: the file is synced at its end."""

    def close(self) -> None:
        """Nothing: the file is closed by who made it."""


class Mosaic(Exporter):
    """MDS files and index.json, as MosaicML's StreamingDataset reads them: ``tokens``, bytes of int32.

    A file: samples u32, where each begins and where the last ends u32[samples + 1], the columns as JSON, then
    per sample the bytes of its column u32 and the column. A sample is a document, or a packed row.
    """

    def _list(self, shard_id: int) -> Path:
        return self.folder / f"{shard_name(shard_id)}.json"

    def is_done(self, shard_id: int) -> bool:
        return size_of_file(self._list(shard_id)) is not None

    def write(self, shard: ShardTokens) -> None:
        lengths = shard.lengths(of_rows=True)
        groups = np.cumsum(4 * lengths + 4) // _MDS_BYTES
        sequences = shard.sequences(lengths)
        entries = []
        for number, group in enumerate(np.unique(groups).tolist()):
            path = self.folder / f"{shard_name(shard.shard_id)}-{number:04d}.mds"
            of_group = lengths[groups == group]
            entries.append(self._write_file(path, of_group, itertools.islice(sequences, len(of_group))))
        publish_bytes(self._list(shard.shard_id), json.dumps(entries).encode())

    @staticmethod
    def _columns() -> dict[str, Any]:
        return {
            "column_encodings": ["bytes"],
            "column_names": ["tokens"],
            "column_sizes": [None],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": _MDS_BYTES,
            "version": 2,
        }

    def _write_file(
        self, path: Path, lengths: npt.NDArray[np.int64], sequences: Iterator[npt.NDArray[np.uint32]]
    ) -> dict[str, Any]:
        config = json.dumps(self._columns(), sort_keys=True).encode()
        begin = 4 + 4 * (len(lengths) + 1) + len(config)
        ends = begin + np.cumsum(np.concatenate([[0], 4 * lengths + 4]))
        if int(ends[-1]) >= 1 << 32:
            raise UsageError(
                f"a document of {int(lengths.max())} tokens does not fit an MDS file; split it before"
            )
        with _published(path) as (file,):
            file.write(np.uint32(len(lengths)).tobytes() + ends.astype("<u4").tobytes() + config)
            for ids in sequences:
                file.write(np.uint32(4 * len(ids)).tobytes() + ids.astype("<i4").tobytes())
        raw = {"basename": path.name, "bytes": int(ends[-1]), "hashes": {}}
        return {**self._columns(), "raw_data": raw, "samples": len(lengths), "zip_data": None}

    def finish(self) -> str:
        entries = [entry for shard_id in range(self.num_shards) for entry in self._entries(shard_id)]
        publish_bytes(self.folder / "index.json", json.dumps({"version": 2, "shards": entries}).encode())
        return f'MosaicML: StreamingDataset(local="{self.folder}"); np.frombuffer(sample["tokens"], np.int32)'

    def _entries(self, shard_id: int) -> list[Any]:
        path = self._list(shard_id)
        try:
            return list(json.loads(read_regular(path, max_bytes=1 << 26)))
        except (ValueError, TypeError, RecursionError, *NOT_THERE):
            raise BrokenShard(f"{path} is not a list of files; remove it and run this again") from None


EXPORTERS: dict[str, type[Exporter]] = {
    "megatron": Megatron,
    "nanogpt": NanoGpt,
    "hf": HuggingFace,
    "mosaicml": Mosaic,
}
STREAMS: Sequence[str] = ("megatron", "nanogpt")  # of which documents are told apart by EOS alone


_SETTINGS = "export.json"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the token ids of a data set in the layout of another tool. Run it again after it was stopped: "
        "it goes on with the shards that are missing."
    )
    parser.add_argument("data_dir", type=Path, help="folder of the data set, complete")
    parser.add_argument("--to", required=True, choices=tuple(EXPORTERS), help="whose layout")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the export")
    parser.add_argument(
        "--put_eos",
        action=argparse.BooleanOptionalAction,
        help="EOS behind documents that lack it (default for megatron and nanogpt)",
    )


def export(args: argparse.Namespace) -> int:
    """``export O``: write what is missing. Raises Refused where the folder has another export."""
    folder: Path = args.output_dir
    plan = need_plan(args.data_dir)
    if plan.options.is_chat:
        raise UsageError(
            f"{args.data_dir} holds conversations, and no other tool's layout keeps their loss mask: their "
            "users' words would be trained on; read them with the loader"
        )
    put_eos = _eos_to_put(plan, args)
    counts = [
        check_shard(args.data_dir, shard_id, plan.plan_id).counts for shard_id in range(plan.num_shards)
    ]
    ends = itertools.accumulate(
        c.num_tokens + (c.num_documents if put_eos is not None else 0) for c in counts
    )
    exporter = EXPORTERS[args.to](
        folder=folder,
        vocab_size=plan.tokenizer.vocab_size,
        num_shards=plan.num_shards,
        first_token=[0, *ends],
    )
    exporter.check_folder()
    _claim(folder, {"to": args.to, "plan_id": plan.plan_id, "put_eos": put_eos})
    todo = [shard_id for shard_id in range(plan.num_shards) if not exporter.is_done(shard_id)]
    with Progress("exporting", len(todo), unit="shards") as progress:
        for shard_id in todo:
            with ShardSamples(args.data_dir, plan.spec, shard_id) as samples:
                whole = plan.options.pack == "best_fit"
                exporter.write(ShardTokens(samples=samples, rows_hold_wholes=whole, put_eos=put_eos))
            progress.add(1)
    opened_by = exporter.finish()
    _remove_temporaries(folder)
    print_lines(f"{plan.num_shards} shards, {exporter.first_token[-1]} tokens in {folder}; {opened_by}")
    return 0


def _remove_temporaries(folder: Path) -> None:
    """What attempts left that died; whatever one that lives would write is there."""
    with contextlib.suppress(OSError):
        for path in [item for item in folder.iterdir() if TEMPORARY_NAME.fullmatch(item.name)]:
            remove_tree(path)


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
    """Say whose export the folder is, once. Raises Refused where it is another's, CannotWrite."""
    path = folder / _SETTINGS
    try:
        found = json.loads(read_regular(path, max_bytes=1 << 20))
    except NOT_THERE:
        found = None
    except ValueError:
        found = {}
    if found is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            others = [name for item in folder.iterdir() if not TEMPORARY_NAME.fullmatch(name := item.name)]
        except OSError as error:
            raise CannotWrite(f"--output_dir {folder} cannot be made: {error.strerror}") from None
        if others:
            raise Refused(
                f"--output_dir {folder} holds {others[0]} and no {_SETTINGS}; choose a fresh folder"
            )
        publish_bytes(path, json.dumps(settings).encode())
    elif found != settings:
        there = found if isinstance(found, dict) else {}
        differing = [name for name in settings if there.get(name) != settings[name]]
        names = ", ".join(differing)
        raise Refused(f"--output_dir {folder} holds another export: {names} differ; choose a fresh folder")
