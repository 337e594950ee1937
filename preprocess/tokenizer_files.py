"""A model's tokenizer, resolved once at planning into files that tasks read with the hub off."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from shardprep.atomic_files import PublishedFolder
from shardprep.errors import (
    BrokenShard,
    CannotWrite,
    NotFound,
    OtherTokenizer,
    ReadWriteError,
    UsageError,
)
from shardprep.format.dataset_spec import TokenizerSpec, tokenizer_fingerprint
from shardprep.format.names import CHAT_TEMPLATES_DIR, TOKENIZER_DIR
from shardprep.regular_files import NOT_THERE, FileStamp, names_in, read_regular, refuse_fifos, stamp_file

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_TOKENIZER_BYTES = 1 << 30  # the largest known have 40 MB


def resolve_tokenizer(model_id: str, folder: Path) -> TokenizerSpec:
    """Write the files of a model's tokenizer, and nothing else of the model, into ``folder``.

    transformers resolves it, because training will: what it changes about a tokenizer.json (a BOS
    switched on in the configuration, say) is in the files written. Takes 2-3 s for the import.
    Raises NotFound (no such model, or no network), UsageError (a slow tokenizer), BrokenShard (a FIFO there).
    """
    refuse_fifos(Path(model_id))
    refuse_fifos(Path(model_id, CHAT_TEMPLATES_DIR))
    tokenizer = _auto_tokenizer(model_id)
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError(
            f"the tokenizer of {model_id} is a slow one ({type(tokenizer).__name__}); a fast one is needed: "
            "look for a copy of the model with a tokenizer.json, or convert it with transformers"
        )
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:  # tokenizers' own writer raises a bare one
        reason = getattr(error, "strerror", None) or error
        raise CannotWrite(
            f"tokenizer files cannot be written to {folder}: {reason}; free some space there (df), or "
            "let TMPDIR name another folder"
        ) from None
    if os.path.isdir(model_id):  # noqa: PTH112 - as below
        _check_special_tokens(Path(model_id), folder)
    return describe_tokenizer(folder, model_id)


def _check_special_tokens(model: Path, resolved: Path) -> None:
    """That no token of the configuration got lost: what transformers cannot read, it goes without, unsaid."""
    named, found = _special_tokens(model), _special_tokens(resolved)
    if lost := [name for name in named if named[name] and not found[name]]:
        raise ReadWriteError(
            f"transformers found no {', '.join(lost)} of {model / TOKENIZER_CONFIG}, which names it; a read "
            "may have failed: run this again"
        )


def _special_tokens(folder: Path) -> dict[str, str | None]:
    """BOS, EOS and pad as tokenizer_config.json names them. Raises ValueError, ReadWriteError."""
    config = json.loads(_text_of(folder / TOKENIZER_CONFIG) or "{}")
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}


def _auto_tokenizer(model_id: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
    except Exception as error:
        where = (
            f"in the folder {model_id}"
            if os.path.isdir(model_id)  # noqa: PTH112 - Path.is_dir() would raise what the file system says
            else f"{model_id!r} on the hub or in its cache"
        )
        reason = " ".join(str(error).split())[:400]
        raise NotFound(
            f"no usable tokenizer was found {where} ({type(error).__name__}: {reason}); expected a folder "
            "with a tokenizer.json, or a model's name and a way to the hub (a gated model needs `hf auth "
            "login`, a node without network a cache filled elsewhere); pass it as --model_id"
        ) from None


def describe_tokenizer(folder: Path, model_id: str) -> TokenizerSpec:
    """What shards remember of the tokenizer whose files are in ``folder``.

    Raises NotFound, BrokenShard or ReadWriteError where they cannot be read, or are no tokenizer's.
    """
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    text = _text_of(path)
    try:
        vocab = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
        fingerprint = tokenizer_fingerprint(text)
        names = _special_tokens(folder)
    except Exception as error:  # tokenizers raises nothing narrower
        raise BrokenShard(
            f"the files in {folder} are no tokenizer's: {' '.join(str(error).split())[:300]}"
        ) from None

    def token_id(name: str) -> int | None:
        token = names[name]
        return vocab.get(token) if isinstance(token, str) else None

    return TokenizerSpec(
        model_id=model_id,
        fingerprint=fingerprint,
        vocab_size=max(vocab.values()) + 1,
        bos_token_id=token_id("bos_token"),
        eos_token_id=token_id("eos_token"),
        pad_token_id=token_id("pad_token"),
    )


def _text_of(path: Path) -> str:
    """The text of a tokenizer's file; of a configuration that is not there, none."""
    try:
        return read_regular(path, max_bytes=MAX_TOKENIZER_BYTES).decode("utf-8")
    except NOT_THERE:
        if path.name == TOKENIZER_CONFIG:
            return ""
        raise NotFound(f"{path} is missing") from None
    except UnicodeDecodeError as error:
        raise BrokenShard(f"{path} is not UTF-8 ({error})") from None


def stamp_tokenizer(folder: Path) -> dict[str, FileStamp]:
    """Size and sha256 of each file in a tokenizer's folder, by name; hidden files are left out.

    Costs a worker 18 ms of CPU at its start for Llama 3's 17.2 MB, 9 ms for 9.1 MB (with SHA instructions).
    Raises BrokenShard for what is no regular file, ReadWriteError.
    """
    stamps = {}
    for name in names_in(folder):
        if not name.startswith("."):
            with contextlib.suppress(*NOT_THERE):  # a link to nothing
                stamps[name] = stamp_file(folder / name)
    return stamps


def check_tokenizer_files(output_dir: Path, planned: dict[str, FileStamp]) -> None:
    """That DATA/tokenizer holds the files that were there at planning, and no others.

    Raises NotFound where one is missing, OtherTokenizer naming those that differ, ReadWriteError.
    """
    folder = output_dir / TOKENIZER_DIR
    found = stamp_tokenizer(folder)
    again = (
        "bring it back as it was, or run the plan command again with the same --model_id, inputs and "
        "options, and the versions of its libraries that planned"
    )
    if missing := sorted(planned.keys() - found.keys()):
        raise NotFound(f"{folder / missing[0]} is missing; {again}")
    if added := sorted(found.keys() - planned.keys()):
        raise OtherTokenizer(f"{folder / added[0]} is no file of the plan's tokenizer; take it away")
    for name, stamp in planned.items():
        if found[name] != stamp:
            raise OtherTokenizer(
                f"{folder / name} has {found[name].num_bytes} bytes of sha256 {found[name].sha256[:12]}, "
                f"the plan says {stamp.num_bytes} of {stamp.sha256[:12]}; {again}"
            )


def publish_tokenizer(
    resolved: Path, output_dir: Path, spec: TokenizerSpec, frozen: dict[str, FileStamp] | None
) -> dict[str, FileStamp]:
    """Make ``output_dir/tokenizer`` hold the tokenizer of ``resolved``; returns its files' stamps.

    ``frozen``: the files that a plan in the folder names. They are kept where they are whole, else put back.
    Without a plan a tokenizer there is no claim, whoever left it: an equal one is kept, so that planners that
    race agree, and another is replaced. What is published is synced: files, folder, and the folder around.
    Raises OtherTokenizer where the resolved files are not ``frozen``, CannotWrite or ReadWriteError.
    """
    target = output_dir / TOKENIZER_DIR

    def is_there() -> bool:
        return _is_tokenizer(target, spec) if frozen is None else _holds(target, frozen)

    if is_there():
        return stamp_tokenizer(target)
    if frozen is not None and stamp_tokenizer(resolved) != frozen:
        raise OtherTokenizer(
            f"{target} is damaged, and the files of {spec.model_id} are not those of the plan, to the byte: "
            "plan with the versions of transformers and tokenizers that planned, or into a new folder"
        )
    with PublishedFolder(target) as folder:
        for name in names_in(resolved):
            _copy(resolved / name, folder.temporary / name)
        if not folder.publish_first() and not is_there():  # another planner may have been faster
            folder.publish()
    return stamp_tokenizer(target)


def _is_tokenizer(folder: Path, spec: TokenizerSpec) -> bool:
    try:
        return describe_tokenizer(folder, spec.model_id) == spec
    except (NotFound, BrokenShard):
        return False


def _holds(folder: Path, stamps: dict[str, FileStamp]) -> bool:
    try:
        return stamp_tokenizer(folder) == stamps
    except BrokenShard:
        return False


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise CannotWrite(f"{target} cannot be written: {error.strerror}") from None
