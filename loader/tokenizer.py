"""The tokenizer that belongs to the shards, and whether ``model_id`` agrees with it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from loader.shards.shard_set import DatasetShards, ShardSet
from shardprep.errors import NotFound, OtherTokenizer, UsageError
from shardprep.format.dataset_spec import tokenizer_fingerprint
from shardprep.format.names import TOKENIZER_DIR
from shardprep.regular_files import close_read, open_regular

# As tokenizers begins a tokenizer.json: truncation and padding hold no list.
_ADDED_TOKENS = re.compile(r'\s*\{[^\[\]]*?"added_tokens":\s*(?=\[)')
_ADDED_TOKENS_CHARS = 1 << 20  # in which they must end


def choose_tokenizer(shards: ShardSet, model_id: str | os.PathLike[str] | None) -> Any:
    """A transformers tokenizer: the data set's own, which needs no network, else that of ``model_id``.

    A ``model_id`` given for a data set of ours must be the model it was made with: the same name, or
    a tokenizer with the same fingerprint (loading it to compare takes about 2 s). Raises NotFound,
    OtherTokenizer, or UsageError where tars of others come without a ``model_id``.
    """
    datasets = shards.datasets
    model_id = None if model_id is None else os.fspath(model_id)
    if len(datasets) < len(shards.sources) and model_id is None:
        raise UsageError(
            "tars that shardprep did not write carry no tokenizer; pass model_id=, the model whose tokenizer "
            "made their token ids"
        )
    if not datasets:
        return _load(str(model_id))
    own = next((d.folder / TOKENIZER_DIR for d in datasets if (d.folder / TOKENIZER_DIR).is_dir()), None)
    if model_id is None or model_id == datasets[0].spec.tokenizer.model_id:
        return _load(str(own) if own else _known_model(datasets[0], model_id))
    given = _load(model_id)
    _check_same(datasets[0], own, model_id, given)
    return _load(str(own)) if own else given


def _known_model(dataset: DatasetShards, model_id: str | None) -> str:
    if model_id is None:
        raise NotFound(
            f"{dataset.folder / TOKENIZER_DIR} is missing; copy it from where the shards were made, or pass "
            f"model_id={dataset.spec.tokenizer.model_id!r}"
        )
    return model_id


def _check_same(dataset: DatasetShards, own: Path | None, model_id: str, given: Any) -> None:
    found, expected = _fingerprint(given), dataset.spec.tokenizer.fingerprint
    if found == expected or (own is not None and found == _fingerprint(_load(str(own)))):
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

    is_folder = Path(name).is_dir()
    if is_folder:
        _check_regular(Path(name))
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


def _check_regular(folder: Path) -> None:
    """That no file of a tokenizer is a FIFO or a device, which transformers would read for ever."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        with contextlib.suppress(OSError):  # what is not there, or cannot be read, transformers says
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
