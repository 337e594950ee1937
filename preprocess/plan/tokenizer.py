"""The tokenizer of a plan: the files that tasks read with the hub off, and what planning must know of it.

What counts is the tokenizer that training will load, by transformers: what that changes about a
tokenizer.json (a token added in the configuration, say) is in the files written here. Of most tokenizers it
changes nothing, and ``plain_files`` shows it by the files alone, without an import of 3 s. For all others
transformers loads and saves, in a process of its own.

What was proved of a tokenizer is kept for the next plan, in ``$XDG_CACHE_HOME/shardprep/tokenizers``. An
entry is known by the content of the files and by the versions of what loaded and encoded them; a damaged one
counts as none. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer, processors

import preprocess
from preprocess.make.engines import (
    PROBE,
    Engine,
    can_be_cut,
    engine_of_tokenizer,
    gate_texts,
    ids_sha256,
    probe_texts,
)
from preprocess.plan.tokenizer_files import (
    MAX_TOKENIZER_BYTES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    spec_of_tokenizer,
    special_tokens_of,
)
from preprocess.plan.transformers_tokenizer import save_in_own_process
from shardprep.errors import BrokenShard, CannotWrite, NotFound, ReadWriteError, ShardprepError, UsageError
from shardprep.files import (
    NOT_THERE,
    STALE_AFTER_S,
    FileStamp,
    PublishedFolder,
    is_folder,
    names_in,
    read_regular,
    refuse_fifos,
    remove_temporaries,
    size_of_file,
)
from shardprep.format.checked_json import Fields, read_checked, with_content_hash
from shardprep.format.dataset_spec import TokenizerSpec
from shardprep.format.names import CHAT_TEMPLATES_DIR
from shardprep.hub import find_on_hub

_FORMAT = "shardprep-tokenizer-proof"
_PROOF_FILE = "proof.json"
_MAX_PROOF_BYTES = 16 << 20
_LIBRARIES = ("tokenizers", "gigatoken", "transformers")
_PROOF_VERSION = 2  # of what a proof says; another one makes every entry unknown


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
        "law": _PROOF_VERSION,
        "shardprep": preprocess.__version__,
        "probe": PROBE,
        "allow_special_tokens": allow_special_tokens,
        "libraries": {name: _installed_version(name) for name in _LIBRARIES},
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _installed_version(name: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


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


SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
MODEL_CONFIG = "config.json"
_COPIED = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, CHAT_TEMPLATE)
_ENDINGS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")  # of what transformers may look at
_MAX_OTHER_BYTES = 64 << 20  # a larger file in the folder is not a tokenizer's

Files = dict[str, bytes]  # by name in the folder


@dataclass(frozen=True, kw_only=True)
class ResolvedTokenizer:
    """A tokenizer whose files are in ``folder``."""

    folder: Path
    proof: Proof
    tokenizer: Tokenizer | None  # loaded; None where the cache knew the rest
    key: str | None  # of the cache; None where it cannot keep this tokenizer

    @property
    def spec(self) -> TokenizerSpec:
        """What shards will remember of it."""
        return self.proof.spec

    def reference(self, *, allow_special_tokens: bool) -> Engine:
        """The engine of ``tokenizers`` for it. Raises ReadWriteError."""
        tokenizer = self.tokenizer or _loaded(
            _read(self.folder / TOKENIZER_FILE), self.folder / TOKENIZER_FILE
        )
        return engine_of_tokenizer(tokenizer, allow_special_tokens=allow_special_tokens)

    def passes_gate(self, fast: Engine, reference: Engine) -> bool:
        """Whether an engine gives the reference's ids on ``gate_texts``; that it did is kept in the cache."""
        cache = cache_folder()
        kept = None if cache is None or self.key is None else cache / f"{self.key}.{fast.name}"
        if kept is not None and size_of_file(kept) is not None:
            return True
        texts = gate_texts(_read(self.folder / TOKENIZER_FILE))
        if ids_sha256([fast.encode(texts)]) != ids_sha256([reference.encode(texts)]):
            return False
        if kept is not None:
            with contextlib.suppress(OSError, ShardprepError):
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.touch()
        return True


def resolve_tokenizer(model_id: str, folder: Path, *, allow_special_tokens: bool) -> ResolvedTokenizer:
    """Write the files of a model's tokenizer, and nothing else of the model, into the empty ``folder``.

    Raises NotFound (no such model, or no network), UsageError (a slow tokenizer, or dropout), CannotWrite,
    BrokenShard (a FIFO there), ReadWriteError, also where transformers missed a token: it does not tell of
    a failed read.
    """
    for each in (Path(model_id), Path(model_id, CHAT_TEMPLATES_DIR)):
        refuse_fifos(each)
    source, name = source_folder(model_id)
    files = read_files(source) if source is not None else None
    key = None if files is None else cache_key(files, allow_special_tokens=allow_special_tokens)
    if files is not None and key is not None and (found := find_proof(key, files, model_id)):
        proof, kept = found
        write_files(kept, folder)
        return ResolvedTokenizer(folder=folder, proof=proof, tokenizer=None, key=key)
    plain = None if files is None else plain_files(files)
    if plain is not None:
        saved, tokenizer, data = plain
        write_files(saved, folder)
    else:
        save_in_own_process(name, folder)
        saved = {name: _read(folder / name) for name in names_in(folder)}
        if files is not None:
            _check_special_tokens(files, saved, str(source))
        tokenizer, data = _parsed(saved, folder)
    _check_no_dropout(_json_object(files or saved, TOKENIZER_FILE), model_id)
    probe = probe_texts(data)
    reference = engine_of_tokenizer(tokenizer, allow_special_tokens=allow_special_tokens)
    proof = Proof(
        spec=spec_of_tokenizer(tokenizer, data, _json_object(saved, TOKENIZER_CONFIG), model_id),
        probe=probe,
        probe_sha256=ids_sha256([reference.encode(probe)]),
        can_be_cut=can_be_cut(data),
    )
    if files is not None and key is not None:
        keep_proof(key, proof, saved, files)
    return ResolvedTokenizer(folder=folder, proof=proof, tokenizer=tokenizer, key=key)


def _check_no_dropout(data: dict[str, Any], model_id: str) -> None:
    """That a tokenizer.json gives a text the same ids each time. Raises UsageError."""
    parts: list[tuple[str, Any]] = [("", {key: data[key] for key in data if key != "added_tokens"})]
    while parts:
        place, part = parts.pop()
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            inner = f"{place}[{key}]" if isinstance(part, list) else f"{place}.{key}".lstrip(".")
            if key == "dropout" and value:
                raise UsageError(
                    f"the tokenizer of {model_id} has {inner} {value} in its {TOKENIZER_FILE}: with it a "
                    "text has other ids each time, so no two shards agree; set it to null in a copy of the "
                    "folder, and pass that as --model_id"
                )
            if isinstance(value, (dict, list)) and inner not in ("model.vocab", "model.merges"):
                parts.append((inner, value))


def source_folder(model_id: str) -> tuple[Path | None, str]:
    """Return the folder of a model, its own or of the hub's cache, and what transformers is to load.

    None where only transformers may know. Raises NotFound.
    """
    if os.path.isdir(model_id):  # noqa: PTH112 - Path.is_dir() would raise what the file system says
        return Path(model_id), model_id
    return (None, model_id) if os.path.lexists(model_id) else find_on_hub(model_id)


def read_files(folder: Path) -> Files | None:
    """What decides a tokenizer's ids in a model's folder; None where more than files does.

    Raises ReadWriteError, BrokenShard for what is no regular file.
    """
    names = names_in(folder)
    if TOKENIZER_FILE not in names or CHAT_TEMPLATES_DIR in names:
        return None
    files = {}
    for name in names:
        if not name.endswith(_ENDINGS) or name.endswith(".index.json"):
            continue
        path = folder / name
        if is_folder(path) or (name != TOKENIZER_FILE and (size_of_file(path) or 0) > _MAX_OTHER_BYTES):
            continue
        with contextlib.suppress(*NOT_THERE):  # a link to nothing
            files[name] = read_regular(path, max_bytes=MAX_TOKENIZER_BYTES)
    return files if TOKENIZER_FILE in files else None


def write_files(files: Files, folder: Path) -> None:
    """Write a tokenizer's files. Raises CannotWrite."""
    try:
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise CannotWrite(
            f"tokenizer files cannot be written to {folder}: {error.strerror}; free some space there (df), "
            "or let TMPDIR name another folder"
        ) from None


# What transformers 5 is known to do with a configuration of these classes, these keys and these models: it
# takes tokenizer.json as it is. Keys that are not here may change ids, or nobody has looked.
_PLAIN_TRANSFORMERS = "5."
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_PLAIN_MODELS = (None, "llama")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_PLAIN_KEYS = {
    *_NAMED, *_LISTED, "added_tokens_decoder", "tokenizer_class", "backend", "chat_template",
    "clean_up_tokenization_spaces", "is_local", "local_files_only", "model_input_names", "model_max_length",
    "name_or_path", "padding_side", "truncation_side",
}  # fmt: skip
_TOKEN_FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


def plain_files(files: Files) -> tuple[Files, Tokenizer, dict[str, Any]] | None:
    """The files that transformers would save, the tokenizer, and its tokenizer.json parsed.

    None where transformers might change ids, or where that is not known. The tokenizer.json is written anew
    by ``tokenizers``, as transformers does; the rest is copied.
    """
    if not version("transformers").startswith(_PLAIN_TRANSFORMERS):
        return None
    try:
        data = orjson.loads(files[TOKENIZER_FILE])
        if not _is_plain(files, data):
            return None
        tokenizer = Tokenizer.from_str(files[TOKENIZER_FILE].decode())
    except Exception:  # tokenizers raises nothing narrower; transformers will say what is wrong
        return None
    if data.get("post_processor") is None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A:0", pair="$A:0 $B:1", special_tokens=[]
        )
    raw = tokenizer.to_str(pretty=True).encode()
    if raw != files[TOKENIZER_FILE]:
        data = orjson.loads(raw)
    copied = {name: files[name] for name in _COPIED if name in files}
    return {TOKENIZER_FILE: raw, **copied}, tokenizer, data


def _is_plain(files: Files, data: dict[str, Any]) -> bool:
    config, model = _json_object(files, TOKENIZER_CONFIG), _json_object(files, MODEL_CONFIG)
    named = _json_object(files, SPECIAL_TOKENS_MAP)
    added = data.get("added_tokens") or []
    if config.get("tokenizer_class") not in _PLAIN_CLASSES or config.keys() - _PLAIN_KEYS:
        return False
    if model.get("model_type") not in _PLAIN_MODELS or model.keys() & {"tokenizer_class", "auto_map"}:
        return False
    if "added_tokens.json" in files or data.get("truncation") or data.get("padding"):
        return False
    if named.keys() - {*_NAMED, *_LISTED}:
        return False
    wanted = special_tokens_of({**config, **named})
    if wanted != special_tokens_of(config):
        return False
    return _names_nothing_new(config, added) and _names_nothing_new(named, added)


def _names_nothing_new(config: dict[str, Any], added: list[dict[str, Any]]) -> bool:
    """Whether every token of a configuration is an added token of tokenizer.json already."""
    known = {token["content"] for token in added}
    tokens = [config[name] for name in _NAMED if config.get(name) is not None]
    for name in _LISTED:
        listed = config.get(name) or []
        if not isinstance(listed, list):
            return False
        tokens += listed
    if not all((token["content"] if isinstance(token, dict) else token) in known for token in tokens):
        return False
    flags = {token["id"]: [token.get(flag) for flag in _TOKEN_FLAGS] for token in added}
    decoder: dict[str, dict[str, Any]] = config.get("added_tokens_decoder") or {}
    return all(
        flags.get(int(number)) == [token.get(flag) for flag in _TOKEN_FLAGS]
        for number, token in decoder.items()
    )


def _check_special_tokens(files: Files, saved: Files, where: str) -> None:
    """That no token of the configuration got lost: what transformers cannot read, it goes without, unsaid."""
    named = special_tokens_of(_json_object(files, TOKENIZER_CONFIG))
    found = special_tokens_of(_json_object(saved, TOKENIZER_CONFIG))
    if lost := [name for name in named if named[name] and not found[name]]:
        raise ReadWriteError(
            f"transformers found no {', '.join(lost)} of {where}/{TOKENIZER_CONFIG}, which names it; a read "
            "may have failed: run this again"
        )


def _json_object(files: Files, name: str) -> dict[str, Any]:
    """A JSON file's object; an empty one for a file that is not there. Raises BrokenShard."""
    try:
        data = orjson.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise BrokenShard(f"the tokenizer's {name} is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise BrokenShard(f"the tokenizer's {name} is a {type(data).__name__}, expected an object")
    return data


def _parsed(saved: Files, folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    if TOKENIZER_FILE not in saved:
        raise NotFound(
            f"{folder / TOKENIZER_FILE} is missing: transformers saved {', '.join(saved) or 'nothing'}"
        )
    return _loaded(saved[TOKENIZER_FILE], folder / TOKENIZER_FILE), orjson.loads(saved[TOKENIZER_FILE])


def _loaded(raw: bytes, path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(raw.decode())
    except Exception as error:  # tokenizers raises nothing narrower
        raise ReadWriteError(f"{path} cannot be loaded: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, max_bytes=MAX_TOKENIZER_BYTES)
    except NOT_THERE:
        raise NotFound(f"{path} is missing") from None
