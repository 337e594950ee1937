"""The files that Megatron, nanoGPT and Hugging Face datasets read.

The files of a shard appear whole or not at all, so a stopped export can be continued. ``finish`` writes the
files that list all shards.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from preprocess.make.token_ids import Ids
from preprocess.read.formats import Numbers
from shardprep import files, publishing
from shardprep.command_line import needs
from shardprep.errors import UsageError
from shardprep.files import FileStamp
from shardprep.output_folder import OutputFolder

SETTINGS = "export.json"  # the mark of the folder
_STREAM = "train.bin"  # of nanoGPT
_MEGATRON_HEAD = struct.Struct("<9sQBQQ")  # of an .idx, see Megatron
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream


class ExportedShard(NamedTuple):
    """The exported ids of a shard."""

    documents: Numbers  # int64[documents]: tokens of each document
    rows: Numbers  # int64[rows]: tokens of each packed row, or of each document if there are no rows
    pieces: Iterator[Ids]  # all ids in order, as arrays uint32[tokens]


class ExportLayout:
    """The files that another tool reads. A shard is done once all its files are as they were written."""

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

    def missing(self) -> list[int]:
        """Return the shards that are not done. Reads the files of the others."""
        remembered = self.folder.remembered()
        shard_ids = range(len(self.num_tokens))
        return [shard_id for shard_id in shard_ids if not self._is_as_written(shard_id, remembered)]

    def is_done(self, shard_id: int) -> bool:
        return self._is_as_written(shard_id, self.folder.remembered())

    def _is_as_written(self, shard_id: int, remembered: Mapping[str, FileStamp]) -> bool:
        names = self.names_of(shard_id)
        return all(self.folder.is_as_written(name, remembered) for name in names)

    def names_of(self, shard_id: int) -> list[str]:
        """Return the names of a shard's files."""
        return [self.last_names[shard_id]]

    def contents(self, name: str, samples: ExportedShard) -> Iterator[tuple[str, Iterable[bytes]]]:
        """Yield the name of each file of a shard, and its bytes in pieces. ``name`` is the last one's."""
        yield name, (ids.astype(self.dtype).tobytes() for ids in samples.pieces)

    def write(self, shard_id: int, samples: ExportedShard) -> None:
        """Write the files of a shard. Raises CannotWrite, ReadWriteError and what reading raises."""
        with contextlib.ExitStack() as stack:
            written: list[tuple[publishing.PublishedFile, FileStamp]] = []
            for name, pieces in self.contents(self.last_names[shard_id], samples):
                file = stack.enter_context(self.folder.new_file(name))
                for piece in pieces:
                    file.write(piece)
                written.append((file, file.sync()))
            for file, stamp in written:
                file.rename_into_place()
                self.folder.sync()  # after a power cut no file may be there without those before it
                self.folder.remember(file.path.name, stamp)

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

    def names_of(self, shard_id: int) -> list[str]:
        name = self.last_names[shard_id]
        return [name.removesuffix(".idx") + ".bin", name]

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

    _has_stream = False  # that was compared

    def missing(self) -> list[int]:
        self._has_stream = self._find_stream()
        return [] if self._has_stream else super().missing()

    def is_done(self, shard_id: int) -> bool:
        return super().is_done(shard_id) or self._find_stream()

    def _find_stream(self) -> bool:
        return self.folder.is_as_written(_STREAM, self.folder.remembered())

    def finish(self) -> str:
        target = self.folder.path_of(_STREAM)
        try:
            if not self._has_stream and not self._find_stream():
                self._write_stream()
        except (publishing.TemporaryRemoved, FileNotFoundError):
            if not self._find_stream():  # of an equal export, which was faster and removed files
                raise
        for name in self.last_names:
            with contextlib.suppress(OSError):
                self.folder.remove(name)
        return f'nanoGPT: np.memmap("{target}", dtype=np.{self.dtype.name}, mode="r")'

    def _write_stream(self) -> None:
        with self.folder.new_file(_STREAM) as file:
            for name in self.last_names:
                self._append(file, name)
            stamp = file.sync()
            file.rename_into_place()
        self.folder.sync()
        self.folder.remember(_STREAM, stamp)

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
        state["_fingerprint"] = self.folder.stamp_of(SETTINGS).sha256[:16]
        self.folder.publish("dataset_info.json", json.dumps(info, indent=1).encode())
        self.folder.publish("state.json", json.dumps(state, indent=1).encode())
        return f'datasets: load_from_disk("{self.folder}")'


LAYOUTS: dict[str, type[ExportLayout]] = {"megatron": Megatron, "nanogpt": NanoGpt, "hf": HuggingFace}
