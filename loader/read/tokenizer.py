"""The tokenizer of the shards, and the check that ``model_id`` has the same one.

Batches need only the ids of padding and EOS, which the data set's files contain. transformers takes longer to
load than everything else, so it is imported only when its tokenizer object is needed.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import orjson

from loader.read.shards import DatasetShards, ShardSet
from shardprep.errors import NotFound, OtherTokenizer, UsageError
from shardprep.files import NOT_THERE, errors_named, read_beginning, read_regular, refuse_fifos
from shardprep.foreign_tokenizer import ForeignTokenizer, has_bounded_cost
from shardprep.format.data_folder import DataFolder
from shardprep.format.index import without_garbage_collection
from shardprep.format.json_files import is_text
from shardprep.format.names import CHAT_TEMPLATES_DIR, TOKENIZER_DIR
from shardprep.format.spec import TokenizerSpec, fingerprint_of
from shardprep.hub import find_on_hub, is_library_fault, no_tokenizer, words_of_fault

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "meta-llama/Meta-Llama-3-8B"  # whose tokenizer made tars that name none
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MAX_FILE_BYTES = 256 << 20  # the largest known tokenizers take 40 MB


class SpecialTokens(Protocol):
    """What batches need of a tokenizer: ``LoaderTokenizer``, or transformers' object."""

    eos_token: str | None
    eos_token_id: int | None
    pad_token: str | None
    pad_token_id: int | None

    def get_added_vocab(self) -> Mapping[str, int]: ...


@dataclass(kw_only=True)
class LoaderTokenizer:
    """The attributes of a tokenizer that batches need, by transformers' names."""

    eos_token: str | None
    eos_token_id: int | None
    pad_token: str | None
    pad_token_id: int | None
    added_vocab: Mapping[str, int]
    fingerprint: str  # of the tokenizer that made the ids
    vocab_size: int  # including added tokens
    given: PreTrainedTokenizerBase | None = None  # None: load it from ``own``
    own: tuple[DataFolder, TokenizerSpec] | None = None  # the data set's copy
    pads_with: str | None = None  # token that becomes the pad token of ``loaded``

    @staticmethod
    def of_loaded(tokenizer: PreTrainedTokenizerBase, fingerprint: str | None = None) -> LoaderTokenizer:
        """Describe a tokenizer that transformers loaded. ``fingerprint``: of the manifests, if known."""
        names = ("eos_token", "eos_token_id", "pad_token", "pad_token_id")
        return LoaderTokenizer(
            **{name: getattr(tokenizer, name) for name in names},
            added_vocab=tokenizer.get_added_vocab(),
            fingerprint=fingerprint or _fingerprint(tokenizer),
            vocab_size=max(tokenizer.get_vocab().values()) + 1,
            given=tokenizer,
        )

    def get_added_vocab(self) -> Mapping[str, int]:
        """Return the ids of the added tokens."""
        return self.added_vocab

    @cached_property
    def loaded(self) -> PreTrainedTokenizerBase:
        """Return transformers' tokenizer object. Raises OtherTokenizer, NotFound or ReadWriteError."""
        tokenizer = _load_own(*self.own) if self.own else self.given
        assert tokenizer is not None
        if self.pads_with is not None:
            tokenizer.pad_token = self.pads_with
        return tokenizer


def choose_tokenizer(shards: ShardSet, model_id: str | os.PathLike[str] | None) -> LoaderTokenizer:
    """Return the data set's own tokenizer, which needs no network, else the tokenizer of ``model_id``."""
    datasets = shards.with_idx
    model_id = None if model_id is None else os.fspath(model_id)
    if shards.has_external and model_id is None and datasets:
        found = "tars that other tools wrote, beside data sets"
        remedy = "model_id="
        expected = f"{remedy}, the model whose tokenizer made their token ids"
        raise UsageError(found=found, expected=expected, remedy=remedy)
    if model_id is None and not datasets:
        model_id = DEFAULT_MODEL
        logger.info(
            f"tars that other tools wrote, without model_id=: the tokenizer of {DEFAULT_MODEL} is used"
        )
    if not datasets:
        return LoaderTokenizer.of_loaded(_load(str(model_id)))
    spec = datasets[0].spec.tokenizer
    own = next((dataset for dataset in datasets if dataset.folder.is_subfolder(TOKENIZER_DIR)), None)
    if own is None:
        if model_id is None:
            remedy = f"model_id={spec.model_id!r}"
            expected = f"a copy of the folder from where the shards were made, or {remedy}"
            path = datasets[0].folder.path_of(TOKENIZER_DIR)
            raise NotFound(path=path, found="missing", expected=expected, remedy=remedy)
        given = _load(model_id)
        if model_id != spec.model_id:
            _check_same(datasets[0], model_id, given)
        for name in _SPECIAL_IDS:  # not part of the fingerprint
            token_id = getattr(spec, name)
            if token_id is not None and getattr(given, name) != token_id:
                setattr(given, name.removesuffix("_id"), given.convert_ids_to_tokens(token_id))
        return LoaderTokenizer.of_loaded(given, spec.fingerprint)
    folder = own.folder
    tokenizer = _read_own(folder, own.spec.tokenizer)
    if tokenizer is None:
        tokenizer = LoaderTokenizer.of_loaded(_load_own(folder, own.spec.tokenizer), spec.fingerprint)
    if model_id is not None and model_id != spec.model_id:
        # A folder with the same file need not be loaded. os.path.isdir never raises, unlike Path.is_dir.
        given_file = Path(model_id, "tokenizer.json")
        if not os.path.isdir(model_id) or _content(given_file) != _own_content(folder, "tokenizer.json"):  # noqa: PTH112
            _check_same(datasets[0], model_id, _load(model_id))
    return tokenizer


def _read_own(folder: DataFolder, spec: TokenizerSpec) -> LoaderTokenizer | None:
    """Read a data set's tokenizer, Llama 3's in 0.5 s. Return None in case of doubt: transformers decides."""
    raw = _own_content(folder, "tokenizer.json")
    if raw is None or _own_content(folder, "added_tokens.json") is not None:  # transformers 4: more tokens
        return None
    with without_garbage_collection():  # 280,000 merges are as many lists
        try:
            data = orjson.loads(raw)
            config = orjson.loads(_own_content(folder, "tokenizer_config.json") or b"{}")
            added = {token["content"]: token["id"] for token in data["added_tokens"]}
            names = {token_id: name for name, token_id in added.items()}
            for name in _SPECIAL_IDS:
                token = config.get(name.removesuffix("_id"))
                content = token["content"] if isinstance(token, dict) else token
                if content != names.get(getattr(spec, name)):
                    return None
            if fingerprint_of(data) != spec.fingerprint:
                return None
            del data  # otherwise the next garbage collection traverses it, in 25 ms
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
    return LoaderTokenizer(
        eos_token=names.get(spec.eos_token_id),
        eos_token_id=spec.eos_token_id,
        pad_token=names.get(spec.pad_token_id),
        pad_token_id=spec.pad_token_id,
        added_vocab=added,
        fingerprint=spec.fingerprint,
        vocab_size=spec.vocab_size,
        own=(folder, spec),
    )


def _content(path: Path) -> bytes | None:
    try:
        return read_regular(path, max_bytes=_MAX_FILE_BYTES)
    except NOT_THERE:
        return None


def _own_content(folder: DataFolder, name: str) -> bytes | None:
    """Return the content of a file of a data set's tokenizer, or None if it does not exist."""
    try:
        return folder.read(f"{TOKENIZER_DIR}/{name}", max_bytes=_MAX_FILE_BYTES)
    except NOT_THERE:
        return None


def _load_own(folder: DataFolder, spec: TokenizerSpec) -> PreTrainedTokenizerBase:
    """Load a data set's tokenizer and compare it with the manifests, as transformers reports no damage."""
    # transformers would follow links and wait for a FIFO, so it gets copies of regular files.
    with (
        errors_named(folder.path_of(TOKENIZER_DIR)),
        tempfile.TemporaryDirectory(prefix="shardprep-") as scratch,
    ):
        for subfolder in (TOKENIZER_DIR, f"{TOKENIZER_DIR}/{CHAT_TEMPLATES_DIR}"):
            _copy_small_files(folder, subfolder, Path(scratch))
        tokenizer = _load(str(Path(scratch, TOKENIZER_DIR)))
    tokenizer.name_or_path = str(folder.path_of(TOKENIZER_DIR))
    pairs = [(name, getattr(tokenizer, name), getattr(spec, name)) for name in _SPECIAL_IDS]
    pairs.append(("fingerprint", _fingerprint(tokenizer)[:12], spec.fingerprint[:12]))
    wrong = [f"{name} {found}, not {expected}" for name, found, expected in pairs if found != expected]
    if wrong:
        expected = f"the tokenizer that made the shards, {spec.model_id!r}; copy the folder from there again"
        path = folder.path_of(TOKENIZER_DIR)
        raise OtherTokenizer(path=path, found="; ".join(wrong), expected=expected)
    return tokenizer


def _copy_small_files(folder: DataFolder, subfolder: str, target: Path) -> None:
    """Copy the files of a subfolder of a data set, but no folders in it. Raises BrokenShard for a link."""
    listed = folder.names(subfolder)
    if listed:
        (target / subfolder).mkdir(parents=True)
    for name in listed:
        place = f"{subfolder}/{name}"
        if not folder.is_subfolder(place):
            (target / place).write_bytes(folder.read(place, max_bytes=_MAX_FILE_BYTES))


def _check_same(dataset: DatasetShards, model_id: str, given: PreTrainedTokenizerBase) -> None:
    fingerprint = _fingerprint(given)
    own = dataset.spec.tokenizer
    if fingerprint != own.fingerprint:
        found = f"model_id={model_id!r}, a tokenizer with fingerprint {fingerprint[:12]}"
        expected = f"{own.model_id!r} with {own.fingerprint[:12]}, or no model_id: the data set has its own"
        raise OtherTokenizer(path=dataset.folder, found=found, expected=expected)


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "of a slow tokenizer" if backend is None else fingerprint_of(json.loads(backend.to_str()))


def check_loads(folder: Path) -> None:
    """Raise BadInput if the tokenizer.json of a folder takes too much to load, found in a limited process."""
    path = folder / "tokenizer.json"
    content = _content(path)
    if content is not None and not has_bounded_cost(content):
        ForeignTokenizer(content, str(path))


def limited_decode(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Return the ``decode`` of transformers' tokenizer, or one within limits if its cost is not bounded."""
    content = tokenizer.backend_tokenizer.to_str().encode()
    if has_bounded_cost(content):
        return tokenizer.decode  # type: ignore[return-value]  # a text, as the ids are of one
    limited = ForeignTokenizer(content, tokenizer.name_or_path)
    return lambda ids: str(limited.call(_decode, ids))


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _load(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer by transformers from a folder, or by its name on the hub."""
    from transformers import AutoTokenizer

    is_folder = os.path.isdir(name)  # noqa: PTH112  returns False where Path.is_dir raises
    if is_folder:
        if not is_text(name):
            raise UsageError(f"the name of {name!a} is not UTF-8, as tokenizers needs it; rename the folder")
        # transformers waits for a FIFO forever and ignores read errors, so open the files here first.
        for folder in (Path(name), Path(name, CHAT_TEMPLATES_DIR)):
            refuse_fifos(folder)
        for path in (Path(name, "tokenizer.json"), Path(name, "tokenizer_config.json")):
            read_beginning(path, 1)
    source = name if is_folder else find_on_hub(name)[1]
    is_local = source != name or is_folder
    check_loads(Path(source))
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=is_local, trust_remote_code=False)
    except BaseException as error:
        if not is_library_fault(error):
            raise
        raise no_tokenizer(name, words_of_fault(error)) from None
