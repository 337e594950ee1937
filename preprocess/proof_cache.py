"""What planning proved of a tokenizer, kept for the next plan: in ``$XDG_CACHE_HOME/shardprep/tokenizers``.

An entry is known by the content of the tokenizer's files and by the versions of what loaded and encoded, so
that it never outlives either. It is a folder that appears whole, with a hash over what it says; one that is
damaged counts as none. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import preprocess
from preprocess.engines import PROBE
from preprocess.tokenizer_files import MAX_TOKENIZER_BYTES
from shardprep.atomic_files import STALE_AFTER_S, PublishedFolder, remove_temporaries
from shardprep.errors import ShardprepError
from shardprep.format.checked_json import Fields, read_checked, with_content_hash
from shardprep.format.dataset_spec import TokenizerSpec
from shardprep.regular_files import NOT_THERE, FileStamp, read_regular

_FORMAT = "shardprep-tokenizer-proof"
_PROOF_FILE = "proof.json"
_MAX_PROOF_BYTES = 16 << 20
_LIBRARIES = ("tokenizers", "fastokens", "transformers")
_LAW = 2  # of what a proof says; another one makes every entry unknown


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What is known of a tokenizer once it was loaded and has encoded the probe."""

    spec: TokenizerSpec
    probe: list[str]
    probe_sha256: str  # of the reference's ids
    can_be_cut: bool


def cache_folder() -> Path | None:
    """Where proofs are kept; None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if given.startswith("/") else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "shardprep" / "tokenizers"


def cache_key(files: dict[str, bytes], *, allow_special_tokens: bool) -> str:
    """The name of an entry: a hash of the tokenizer's files and of all that a proof depends on besides."""
    facts = {
        "law": _LAW,
        "shardprep": preprocess.__version__,
        "probe": PROBE,
        "allow_special_tokens": allow_special_tokens,
        "libraries": {name: version(name) for name in _LIBRARIES},
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def find_proof(key: str, files: dict[str, bytes], model_id: str) -> tuple[Proof, dict[str, bytes]] | None:
    """A proof and the tokenizer's files as they were saved then; None where there is no whole entry.

    ``files``: the source's; those that were saved as they are lie in no entry. The proof names ``model_id``.
    """
    if (cache := cache_folder()) is None:
        return None
    entry = cache / key
    try:
        fields = read_checked(entry / _PROOF_FILE, _FORMAT, max_bytes=_MAX_PROOF_BYTES)
        stamps = fields.each("files", Fields.stamp)
        proof = Proof(
            spec=dataclasses.replace(TokenizerSpec.from_json(fields.fields("tokenizer")), model_id=model_id),
            probe=fields.texts("probe"),
            probe_sha256=fields.digest("probe_sha256"),
            can_be_cut=fields.flag("can_be_cut"),
        )
        fields.end()
        saved = {}
        for name, stamp in stamps.items():
            content = files.get(name, b"")
            if _stamp(content) != stamp:
                content = read_regular(entry / Path(name).name, max_bytes=MAX_TOKENIZER_BYTES)
            if _stamp(content) != stamp:
                return None
            saved[name] = content
    except (*NOT_THERE, ShardprepError):
        return None
    return proof, saved


def keep_proof(key: str, proof: Proof, saved: dict[str, bytes], files: dict[str, bytes]) -> None:
    """Keep a proof with the files saved, but for those that equal the source's. What fails is not missed."""
    if (cache := cache_folder()) is None:
        return
    content = with_content_hash(
        _FORMAT,
        {
            "tokenizer": dataclasses.asdict(proof.spec),
            "files": {name: dataclasses.asdict(_stamp(raw)) for name, raw in saved.items()},
            "probe": proof.probe,
            "probe_sha256": proof.probe_sha256,
            "can_be_cut": proof.can_be_cut,
        },
    )
    with contextlib.suppress(OSError, ShardprepError):
        cache.mkdir(parents=True, exist_ok=True)
        remove_temporaries(cache, key, older_than_s=STALE_AFTER_S)
        with PublishedFolder(cache / key) as folder:
            for name, raw in saved.items():
                if files.get(name) != raw:
                    (folder.temporary / name).write_bytes(raw)
            (folder.temporary / _PROOF_FILE).write_text(json.dumps(content), encoding="utf-8")
            folder.publish()


def _stamp(content: bytes) -> FileStamp:
    return FileStamp(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
