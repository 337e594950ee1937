"""Write one shard: encoded batches become a tar, its idx, a quarantine file and, last, a manifest.

A data set has one of two forms: a sample per document, or packed rows of seq_len tokens, of which a group
becomes one member. The groups depend on the documents alone, not on how they are batched. The tar has the
same bytes as from webdataset's TarWriter.

Files have temporary names until all of them are synced, once, at the end: tar, idx, and where needed
quarantine, ids, digests. When they are renamed and their folders are synced, the manifest follows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
from msgspec.structs import asdict, replace

from preprocess.make.attempt import AttemptMark, end_other_attempts
from preprocess.make.counts import Counting
from preprocess.make.members import DocumentMembers
from preprocess.make.pieces import EncodedBatch, TarPiece
from preprocess.make.rows import RowMembers
from shardprep import publishing
from shardprep.format import names
from shardprep.format.blanked import BlankedDocuments
from shardprep.format.data_folder import DataFolder
from shardprep.format.idx import IDX_DTYPES, ChunkCrcs, idx_header
from shardprep.format.manifest import Manifest, RunFacts, ValidationCounts
from shardprep.format.plan_options import PlanOptions
from shardprep.format.spec import DatasetSpec


class ShardWriter:
    """Writes one shard, as a context manager.

    ``commit`` publishes it, and ``publish_quarantine`` only the list of the documents that were left out.
    After any other end of the block nothing is left.
    """

    def __init__(
        self,
        folder: DataFolder,
        spec: DatasetSpec,
        options: PlanOptions,
        shard_id: int,
        *,
        writes_behind: bool = False,
    ) -> None:
        """Write into ``folder``, the plan's or another one.

        ``writes_behind``: write the tar in a thread, for a process that does little else.
        """
        self._folder = folder
        self._spec = spec
        self._options = options
        self._shard_id = shard_id
        self._writes_behind = writes_behind
        self._members: RowMembers | DocumentMembers = DocumentMembers(spec)
        if spec.has_rows:
            self._members = RowMembers(spec, shard_id, options)
        self.counting = Counting(shard_id)
        self._num_samples = 0
        self._crcs = ChunkCrcs(IDX_DTYPES[spec.kind])
        self._side_files: dict[str, publishing.PublishedFile] = {}  # ids and digests, if they are kept
        self._validation: list[TarPiece] = []  # their records and digests come after all others
        self._mark = AttemptMark(folder, shard_id)
        self._files = contextlib.ExitStack()

    def __enter__(self) -> ShardWriter:
        shard_id = self._shard_id
        with self._files as opened:
            opened.callback(self._mark.release)
            self._mark.make()
            self._tar = self._file(names.tar_name(shard_id))
            if self._writes_behind:
                self._tar.write_behind()
            self._idx = self._file(names.idx_name(shard_id))
            if self._options.id_field:
                self._side_files["ids"] = self._file(names.ids_name(shard_id))
            if self._options.digests:
                self._side_files["digests"] = self._file(names.digests_name(shard_id))
            self._idx.write(idx_header(self._spec, shard_id))
            self._files = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _file(self, name: str) -> publishing.PublishedFile:
        subfolder = name.rpartition("/")[0]
        if subfolder:
            self._folder.make_subfolder(subfolder)
        return self._files.enter_context(self._folder.new_file(name))

    def append(self, batch: EncodedBatch) -> None:
        """Add documents, in the order of the input."""
        self.counting.merge(batch.counts)
        if "ids" in self._side_files:
            self._side_files["ids"].write(batch.id_lines)
        self._write(self._members.pieces(batch))

    def _write(self, pieces: Iterable[TarPiece]) -> None:
        for piece in pieces:
            self._tar.write(memoryview(piece.data))  # type: ignore[arg-type]  # numpy's arrays are buffers, too
            if piece.is_validation:
                self._validation.append(piece._replace(data=b""))
            else:
                self._write_records(piece)

    def _write_records(self, piece: TarPiece) -> None:
        """Write the idx records and digests of a piece."""
        raw = piece.records.tobytes()
        self._idx.write(raw)
        self._crcs.add(raw)
        self._num_samples += len(piece.records)
        if "digests" in self._side_files:
            self._side_files["digests"].write(piece.digests.tobytes())

    def commit(self, run: RunFacts, *, blanked: BlankedDocuments | None = None) -> Manifest:
        """Publish the files of the shard. The manifest, which has the arguments, is the last."""
        self._write(self._members.rest())
        for piece in self._validation:
            self._write_records(piece)
        self._tar.write(names.TAR_END)
        self._idx.write(self._crcs.table())
        written = {"tar": self._tar, "idx": self._idx, **self._side_files}
        if self.counting.bad:
            written["quarantine"] = self._write_quarantine()
        stamps: dict[str, Any] = dict.fromkeys(names.STAMPED_NAMES)
        stamps |= {name: file.sync() for name, file in written.items()}
        validation = None
        if self._spec.validation_fraction:
            validation = ValidationCounts(
                num_samples=sum(len(piece.records) for piece in self._validation),
                num_documents=sum(len(piece.digests) for piece in self._validation),
                num_tokens=sum(int(piece.records["num_tokens"].sum()) for piece in self._validation),
            )
        members = self._members
        counts, texts = self.counting.counts(
            self._num_samples,
            num_padding=members.num_padding,
            num_split=members.num_split,
            validation=validation,
        )
        manifest = Manifest(
            spec=self._spec,
            shard_id=self._shard_id,
            counts=counts,
            run=replace(run, texts=texts),
            unblanked_sha256=None if blanked is None else blanked.unblanked_sha256,
            blanked_sha256=None if blanked is None else blanked.sha256(),
            **stamps,
        )
        for key, file in written.items():
            file.rename_into_place()
            subfolder = names.STAMPED_NAMES[key](self._shard_id).rpartition("/")[0]
            if subfolder:
                self._folder.sync(subfolder)
        self._folder.sync()
        self._folder.publish(names.manifest_name(self._shard_id), manifest.to_json())
        if self._mark.others_came():
            end_other_attempts(self._folder, self._shard_id)
        return manifest

    def publish_quarantine(self) -> Path:
        """Publish the quarantine file alone, for a shard that fails by the documents in it. Return its path.

        Its folder is not synced: the next attempt writes it again.
        """
        file = self._write_quarantine()
        file.sync()
        file.rename_into_place()
        return file.path

    def _write_quarantine(self) -> publishing.PublishedFile:
        """Write a line for each document that was left out, and return the file before it is synced."""
        file = self._file(names.quarantine_name(self._shard_id))
        for bad in self.counting.bad:
            entry = asdict(bad)
            del entry["source"]
            file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
        return file
