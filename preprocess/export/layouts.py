"""The layouts of other tools, byte by byte: Megatron's indexed data set, nanoGPT's stream, Arrow, and MDS.

An exporter writes the files of one shard whole or not at all, so that an export that was stopped goes on with
the shards that are missing; ``finish`` writes what names them all.
"""

from __future__ import annotations

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

from preprocess.shard_samples import ShardSamples
from shardprep.atomic_files import PublishedFile, publish_bytes, remove_tree, sync_folder
from shardprep.errors import BrokenShard, CannotWrite, ReadWriteError, UsageError
from shardprep.format.names import shard_name
from shardprep.regular_files import NOT_THERE, read_regular, size_of_file

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
            raise UsageError(
                "--to hf writes Arrow files, and pyarrow is not installed: pip install 'shardprep[columns]'"
            ) from None
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
