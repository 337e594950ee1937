"""Documents' ids -> one shard on disk: tar, idx, quarantine, and the manifest last."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from preprocess.document_members import DocumentMembers
from preprocess.documents import BadDocument, DocumentBatch
from preprocess.packed_rows import PackedRows, append_token
from preprocess.published_file import (
    STALE_AFTER_S,
    PublishedFile,
    remove_temporaries,
    sync_folder,
)
from preprocess.shard_format import (
    TAR_END,
    CannotWrite,
    DatasetSpec,
    Manifest,
    ShardCounts,
    idx_header,
    idx_path,
    manifest_path,
    quarantine_path,
    shard_name,
    tar_path,
)
from preprocess.token_batches import TokenBatch


class ShardWriter:
    """Writes one shard. Within ``with``; only ``commit`` makes it count, and a failure leaves nothing."""

    def __init__(
        self, folder: Path, spec: DatasetSpec, shard_id: int, *, keep_text: bool, sources: list[str]
    ) -> None:
        self._folder = folder
        self._spec = spec
        self._shard_id = shard_id
        self._sources = sources  # paths of the plan's inputs, for the quarantine file
        self._members: DocumentMembers | PackedRows
        if spec.record == "packed":
            self._members = PackedRows(spec, shard_id)
        else:
            self._members = DocumentMembers(spec, shard_id, keep_text=keep_text)
        self._num_samples = self._num_documents = self._num_tokens = 0
        self._num_lines = self._num_empty = self._input_bytes = 0
        self._histogram = np.zeros(64, np.int64)
        self._bad: list[BadDocument] = []
        remove_temporaries(folder, shard_name(shard_id), older_than_s=STALE_AFTER_S)
        self._tar = PublishedFile(tar_path(folder, shard_id))
        try:
            self._idx = PublishedFile(idx_path(folder, shard_id))
        except CannotWrite:
            self._tar.discard()
            raise
        self._files = [self._tar, self._idx]
        self._idx.write(idx_header(spec, shard_id))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.discard()

    @property
    def num_bad(self) -> int:
        return len(self._bad)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def bad_fraction(self) -> float:
        """Share of the documents so far that were left out."""
        return len(self._bad) / max(1, len(self._bad) + self._num_documents)

    def append(self, documents: DocumentBatch, tokens: TokenBatch) -> None:
        """Add a batch of documents with their ids, in the order of the input."""
        if self._spec.append_eos:
            assert self._spec.tokenizer.eos_token_id is not None
            tokens = append_token(tokens, self._spec.tokenizer.eos_token_id)
        self._num_documents += len(documents.texts)
        self._num_lines += documents.num_lines
        self._num_empty += documents.num_empty
        self._input_bytes += documents.num_bytes
        self._num_tokens += len(tokens.ids)
        self._histogram += np.bincount(np.frexp(tokens.lengths)[1], minlength=64)
        self._bad += documents.bad
        written = self._members.append(documents, tokens, self._tar.num_bytes)
        self._write([written] if isinstance(written, tuple) else written)

    def _write(self, members: Iterable[tuple[bytes | memoryview, npt.NDArray[np.void]]]) -> None:
        for data, entries in members:
            self._tar.write(data)
            self._idx.write(entries.tobytes())
            self._num_samples += len(entries)

    def commit(self, run: dict[str, Any]) -> Manifest:
        """Publish the shard; its manifest, with ``run`` in it, comes last."""
        if isinstance(self._members, PackedRows):
            self._write(self._members.finish(self._tar.num_bytes))
        self._tar.write(TAR_END)
        stamps = {"tar": self._tar.sync(), "idx": self._idx.sync()}
        quarantine = self.quarantine()
        manifest = Manifest(
            spec=self._spec,
            shard_id=self._shard_id,
            counts=self._counts(),
            quarantine=None if quarantine is None else quarantine.sync(),
            run=run,
            **stamps,
        )
        self._tar.publish()
        self._idx.publish()
        if quarantine is not None:
            quarantine.publish()
            sync_folder(quarantine.path.parent)
        sync_folder(self._folder)
        vouching = PublishedFile(manifest_path(self._folder, self._shard_id))
        self._files.append(vouching)
        vouching.write(manifest.to_json())
        vouching.sync()
        vouching.publish()
        sync_folder(self._folder)
        remove_temporaries(self._folder, shard_name(self._shard_id), older_than_s=0)
        return manifest

    def quarantine(self) -> PublishedFile | None:
        """The unpublished quarantine file, where documents were left out."""
        if not self._bad:
            return None
        path = quarantine_path(self._folder, self._shard_id)
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"{path.parent} cannot be made: {error.strerror}") from None
        file = PublishedFile(path)
        self._files.append(file)
        for bad in self._bad:
            entry = {**dataclasses.asdict(bad), "source": self._sources[bad.source]}
            file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
        return file

    def _counts(self) -> ShardCounts:
        reasons = sorted({bad.reason for bad in self._bad})
        used = np.flatnonzero(self._histogram)
        return ShardCounts(
            num_samples=self._num_samples,
            num_documents=self._num_documents,
            num_tokens=self._num_tokens,
            num_lines=self._num_lines,
            num_empty=self._num_empty,
            num_padding=self._members.num_padding if isinstance(self._members, PackedRows) else 0,
            input_bytes=self._input_bytes,
            quarantined={reason: sum(bad.reason == reason for bad in self._bad) for reason in reasons},
            length_histogram=self._histogram[: used[-1] + 1].tolist() if len(used) else [],
        )
