"""shard-N.json: what a data set is, what one shard of it holds, and whether it is done."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from preprocess.shard_format.errors import BrokenShard, MissingShard, OtherPlan, UnknownVersion
from preprocess.shard_format.names import (
    FORMAT_VERSION,
    Record,
    TokenFormat,
    idx_path,
    manifest_path,
    quarantine_path,
    remake_command,
    rerun_command,
    tar_path,
    token_dtype,
)


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """What shards remember of the tokenizer that made them."""

    model_id: str
    fingerprint: str  # see tokenizer_fingerprint.py
    vocab_size: int  # added tokens included
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """What all shards of a data set have in common; every manifest carries it whole."""

    plan_id: str
    num_shards: int
    record: Record
    token_format: TokenFormat
    seq_len: int  # tokens a row; 0 unless packed
    append_eos: bool
    tokenizer: TokenizerSpec

    @property
    def kind(self) -> str:
        """How a sample's ids are stored: one of IDX_KINDS."""
        return "packed" if self.record == "packed" else self.token_format

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.tokenizer.vocab_size)

    @staticmethod
    def from_json(data: dict[str, Any]) -> DatasetSpec:
        return DatasetSpec(**{**data, "tokenizer": TokenizerSpec(**data["tokenizer"])})


@dataclass(frozen=True, kw_only=True)
class ShardCounts:
    """What a shard holds. Equal for equal inputs and options, whatever made it."""

    num_samples: int  # documents, or packed rows
    num_documents: int
    num_tokens: int  # padding excluded
    num_lines: int  # lines of the input, the empty ones included
    num_empty: int  # lines left out because nothing is left of them after str.strip
    num_padding: int  # pad tokens in the rows that are not full
    num_cut: int  # documents that do not lie whole in one row
    input_bytes: int
    quarantined: dict[str, int]  # documents left out, by reason
    length_histogram: list[int]  # [b]: documents of 2**(b-1) <= tokens < 2**b


@dataclass(frozen=True, kw_only=True)
class FileStamp:
    """Size and content hash of one published file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """shard-N.json: written last, so that its presence says the shard is done."""

    spec: DatasetSpec
    shard_id: int
    counts: ShardCounts
    tar: FileStamp
    idx: FileStamp
    quarantine: FileStamp | None
    run: dict[str, Any]  # what may vary between equal shards: engine, versions, host, times

    def to_json(self) -> bytes:
        """The bytes on disk; the part before ``run`` is equal for equal shards."""
        data = {"format": "shardprep-manifest", "version": FORMAT_VERSION, **dataclasses.asdict(self)}
        return json.dumps(data, ensure_ascii=False, indent=1).encode() + b"\n"

    @staticmethod
    def from_json(data: dict[str, Any]) -> Manifest:
        quarantine = data["quarantine"]
        return Manifest(
            spec=DatasetSpec.from_json(data["spec"]),
            shard_id=data["shard_id"],
            counts=ShardCounts(**data["counts"]),
            tar=FileStamp(**data["tar"]),
            idx=FileStamp(**data["idx"]),
            quarantine=FileStamp(**quarantine) if quarantine else None,
            run=data["run"],
        )


def version_message(path: Path, found: object) -> str:
    return (
        f"{path} has format version {found}, this shardprep knows {FORMAT_VERSION}; "
        "install the shardprep that wrote it, or make the data set again in a new folder"
    )


def parse_json(path: Path, raw: bytes, form: str) -> dict[str, Any]:
    """Parse one of our JSON files and check its ``format`` and ``version``.

    Raises BrokenShard where it is not such a file, UnknownVersion where it is a newer one.
    """
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise BrokenShard(f"{path} is not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != form:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise BrokenShard(f"{path} is not a {form}: its format is {found!r}")
    if data.get("version") != FORMAT_VERSION:
        raise UnknownVersion(version_message(path, data.get("version")))
    return data


def read_manifest(folder: Path, shard_id: int) -> Manifest:
    """Read shard-N.json. Raises MissingShard, BrokenShard or UnknownVersion."""
    path = manifest_path(folder, shard_id)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise MissingShard(
            f"shard {shard_id:05d} is not done: {path} is missing; run: {rerun_command(shard_id, folder)}"
        ) from None
    try:
        return Manifest.from_json(parse_json(path, raw, "shardprep-manifest"))
    except BrokenShard as error:
        raise BrokenShard(f"{error}; run: {rerun_command(shard_id, folder)}") from None
    except (KeyError, TypeError) as error:
        raise BrokenShard(
            f"{path} is not a whole manifest: {error!r}; run: {rerun_command(shard_id, folder)}"
        ) from None


def check_shard(folder: Path, shard_id: int, plan_id: str) -> Manifest:
    """Whether a shard is done: a manifest of this plan, and its files there with their sizes.

    Raises MissingShard, BrokenShard, UnknownVersion or OtherPlan, each saying what to do.
    """
    manifest = read_manifest(folder, shard_id)
    if manifest.spec.plan_id != plan_id or manifest.shard_id != shard_id:
        raise OtherPlan(
            f"{manifest_path(folder, shard_id)} is shard {manifest.shard_id} of plan "
            f"{manifest.spec.plan_id[:12]}, expected shard {shard_id} of {plan_id[:12]}; "
            "use a new folder for other inputs or options. If it is this file that is out of place, "
            f"run: {remake_command(shard_id, folder)}"
        )
    for path, stamp in shard_files(folder, manifest):
        found = path.stat().st_size if path.exists() else None
        if found is None:
            raise MissingShard(f"{path} is missing; run: {rerun_command(shard_id, folder)}")
        if found != stamp.num_bytes:
            raise BrokenShard(
                f"{path} has {found} of {stamp.num_bytes} bytes; run: {rerun_command(shard_id, folder)}"
            )
    return manifest


def shard_files(folder: Path, manifest: Manifest) -> list[tuple[Path, FileStamp]]:
    """The files a manifest vouches for, with what it says of each."""
    shard_id = manifest.shard_id
    files = [(tar_path(folder, shard_id), manifest.tar), (idx_path(folder, shard_id), manifest.idx)]
    if manifest.quarantine is not None:
        files.append((quarantine_path(folder, shard_id), manifest.quarantine))
    return files


def check_hashes(folder: Path, manifest: Manifest) -> None:
    """Read a shard's files whole and compare sha256. Raises BrokenShard."""
    for path, stamp in shard_files(folder, manifest):
        with path.open("rb") as file:
            found = file_sha256(file)
        if found != stamp.sha256:
            raise BrokenShard(
                f"{path} has sha256 {found[:12]}, its manifest says {stamp.sha256[:12]}; "
                f"run: {remake_command(manifest.shard_id, folder)}"
            )


def file_sha256(file: BinaryIO) -> str:
    """sha256 of an open binary file from where it stands, in blocks of 4 MiB."""
    digest = hashlib.sha256()
    while block := file.read(1 << 22):
        digest.update(block)
    return digest.hexdigest()
