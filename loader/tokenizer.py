"""The tokenizer that belongs to the shards, whether ``model_id`` agrees with it, and its pad token."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.shards.shard_set import DatasetShards, ShardSet
from shardprep.errors import NotFound, OtherTokenizer, UsageError
from shardprep.format.dataset_spec import TokenizerSpec, tokenizer_fingerprint
from shardprep.format.names import CHAT_TEMPLATES_DIR, TOKENIZER_DIR
from shardprep.regular_files import NOT_THERE, close_read, errors_named, is_folder, open_regular, refuse_fifos

# As tokenizers begins a tokenizer.json: truncation and padding hold no list.
_ADDED_TOKENS = re.compile(r'\s*\{[^\[\]]*?"added_tokens":\s*(?=\[)')
_ADDED_TOKENS_CHARS = 1 << 20  # in which they must end
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_READ_FILES = ("tokenizer.json", "tokenizer_config.json")


def choose_tokenizer(shards: ShardSet, model_id: str | os.PathLike[str] | None) -> Any:
    """A transformers tokenizer: the data set's own, which needs no network, else that of ``model_id``.

    A ``model_id`` given for a data set of ours must be the model it was made with: the same name, or
    a tokenizer with the same fingerprint (loading it to compare takes about 2 s). Raises NotFound,
    OtherTokenizer, or UsageError where tars of others come without a ``model_id``.
    """
    datasets = shards.datasets
    model_id = None if model_id is None else os.fspath(model_id)
    if shards.has_external and model_id is None:
        raise UsageError(
            "tars that shardprep did not write carry no tokenizer; pass model_id=, the model whose tokenizer "
            "made their token ids"
        )
    if not datasets:
        return _load(str(model_id))
    spec = datasets[0].spec.tokenizer
    own = next((dataset for dataset in datasets if _has_tokenizer(dataset)), None)
    tokenizer = None if own is None else _load_own(own)
    if model_id is not None and model_id != spec.model_id:
        given = _load(model_id)
        _check_same(datasets[0], tokenizer, model_id, given)
    elif tokenizer is None:
        given = _load(_known_model(datasets[0], model_id))
    return _with_special_ids(given, spec) if tokenizer is None else tokenizer


def _has_tokenizer(dataset: DatasetShards) -> bool:
    return is_folder(dataset.folder / TOKENIZER_DIR)


def _load_own(dataset: DatasetShards) -> Any:
    """The tokenizer in a data set's folder, found to be the one of its manifests.

    Where a file of it is damaged, or cannot be looked at, transformers takes another tokenizer or other
    special tokens, and says nothing. Raises OtherTokenizer, ReadWriteError, or NotFound.
    """
    folder = dataset.folder / TOKENIZER_DIR
    tokenizer, spec = _load(str(folder)), dataset.spec.tokenizer
    expected = {name: getattr(spec, name) for name in _SPECIAL_IDS}
    found = {name: getattr(tokenizer, name) for name in _SPECIAL_IDS}
    expected["fingerprint"], found["fingerprint"] = spec.fingerprint, _fingerprint(tokenizer)
    wrong = [
        f"{name} {_short(found[name])}, expected {_short(expected[name])}"
        for name in expected
        if found[name] != expected[name]
    ]
    if wrong:
        raise OtherTokenizer(
            f"the files in {folder} are not the tokenizer that made the shards ({spec.model_id!r}): "
            f"{'; '.join(wrong)}; copy the folder anew from where the shards were made"
        )
    return tokenizer


def _short(value: object) -> object:
    return value[:12] if isinstance(value, str) else value


def _with_special_ids(tokenizer: Any, spec: TokenizerSpec) -> Any:
    """The same tokenizer with the manifests' BOS, EOS and padding, which a fingerprint leaves out."""
    for name in _SPECIAL_IDS:
        token_id = getattr(spec, name)
        if token_id is not None and getattr(tokenizer, name) != token_id:
            setattr(tokenizer, name.removesuffix("_id"), tokenizer.convert_ids_to_tokens(token_id))
    return tokenizer


def _known_model(dataset: DatasetShards, model_id: str | None) -> str:
    if model_id is None:
        raise NotFound(
            f"{dataset.folder / TOKENIZER_DIR} is missing; copy it from where the shards were made, or pass "
            f"model_id={dataset.spec.tokenizer.model_id!r}"
        )
    return model_id


def _check_same(dataset: DatasetShards, own: Any, model_id: str, given: Any) -> None:
    found, expected = _fingerprint(given), dataset.spec.tokenizer.fingerprint
    if found == expected or (own is not None and found == _fingerprint(own)):
        return
    raise OtherTokenizer(
        f"model_id={model_id!r} has a tokenizer with fingerprint {found[:12]}, but {dataset.folder} was made "
        f"with {dataset.spec.tokenizer.model_id!r} ({expected[:12]}); leave model_id out to use the data "
        "set's own tokenizer, or prepare the text again with the other one"
    )


def fingerprint_of(shards: ShardSet, tokenizer: Any) -> str:
    """The fingerprint of the tokenizer that made the ids; computed only where no manifest has it."""
    datasets = shards.datasets
    return datasets[0].spec.tokenizer.fingerprint if datasets else _fingerprint(tokenizer)


def _fingerprint(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "of a slow tokenizer" if backend is None else tokenizer_fingerprint(backend.to_str())


def _load(name: str) -> Any:
    from transformers import AutoTokenizer

    is_folder = os.path.isdir(name)  # noqa: PTH112  False, not an error, where it cannot be looked at
    if is_folder:
        _check_files(Path(name))
    try:
        known = _added_tokens(Path(name)) if is_folder else {}
        return AutoTokenizer.from_pretrained(
            name, local_files_only=is_folder, trust_remote_code=False, **known
        )
    except Exception as error:  # transformers raises OSError, ValueError, and what the hub's client raises
        reason = " ".join(str(error).split())[:300]
        where = f"in the folder {name}" if is_folder else f"for {name!r} on the hub or in its cache"
        raise NotFound(
            f"no usable tokenizer was found {where} ({type(error).__name__}: {reason}); expected a folder "
            "with a tokenizer.json, or a model's name and a way to the hub"
        ) from None


def _check_files(folder: Path) -> None:
    """Open each file that transformers may read: it waits for a FIFO for ever, and goes on after an error.

    Raises BrokenShard for what is no regular file, ReadWriteError where the file system fails.
    """
    refuse_fifos(folder)
    refuse_fifos(folder / CHAT_TEMPLATES_DIR)
    for name in _READ_FILES:
        with contextlib.suppress(*NOT_THERE), errors_named(folder / name):
            close_read(open_regular(folder / name))


def _added_tokens(folder: Path) -> dict[str, Any]:
    """``added_tokens_decoder`` as transformers would find it, which parses all of tokenizer.json for it.

    Of Llama 3's that takes as long as loading it does, and 90 MB. Nothing where another file has a say in
    the added tokens, or tokenizer.json begins otherwise: transformers then does as always.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
        with (folder / "tokenizer.json").open(encoding="utf-8") as file:
            text = file.read(_ADDED_TOKENS_CHARS)
        begins = _ADDED_TOKENS.match(text)
        others = any((folder / name).exists() for name in ("added_tokens.json", "special_tokens_map.json"))
        if begins is None or others or "added_tokens_decoder" in config:
            return {}
        tokens, _ = json.JSONDecoder().raw_decode(text, begins.end())
        return {"added_tokens_decoder": {token.pop("id"): token for token in tokens}}
    except (OSError, ValueError, KeyError, TypeError):  # whatever is wrong, transformers says it
        return {}


PAD_TOKEN = "<|finetune_right_pad_id|>"  # Llama 3.1 and later keep it for this
_RESERVED = re.compile(r"<\|reserved_special_token_\d+\|>")


@dataclass(frozen=True, kw_only=True)
class PadToken:
    """The id that fills a batch to the right, and why it is this one."""

    token: str
    token_id: int
    reason: str


def choose_pad_token(tokenizer: Any) -> PadToken:
    """A token that the tokenizer has already; none is ever added.

    Its own pad token, else Llama's, else the first reserved one, else EOS: labels are masked by the
    attention mask, never by id, so a real EOS keeps its label. Raises UsageError where there is none.
    """
    if tokenizer.pad_token_id is not None:
        return PadToken(
            token=tokenizer.pad_token, token_id=tokenizer.pad_token_id, reason="the tokenizer's own pad token"
        )
    by_id = sorted((number, token) for token, number in tokenizer.get_added_vocab().items())
    for number, token in by_id:
        if token == PAD_TOKEN:
            return PadToken(token=token, token_id=number, reason="the tokenizer names none, and has this one")
    for number, token in by_id:
        if _RESERVED.fullmatch(token):
            return PadToken(token=token, token_id=number, reason="the first reserved token; no text has it")
    if tokenizer.eos_token_id is None:
        raise UsageError("the tokenizer has neither a pad nor an EOS token; set tokenizer.pad_token")
    return PadToken(
        token=tokenizer.eos_token,
        token_id=tokenizer.eos_token_id,
        reason="EOS, for want of another; the attention mask tells it from a real one",
    )
