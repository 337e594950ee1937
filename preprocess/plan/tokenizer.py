"""Resolve the tokenizer of a plan: write the files that tasks read without the hub, and inspect it.

Training loads the tokenizer with transformers, so the files written here have what transformers changes about
a tokenizer.json, such as a token of the configuration. For most tokenizers it changes nothing, which
``plain_files`` finds out from the files. Others are loaded and saved by transformers, in a process of its own
without torch, whose import would take 3 s and 200 MB for nothing.

The result is cached for the next plan in ``$XDG_CACHE_HOME/shardprep/tokenizers``, by the content of the
model's files and the versions of the libraries. For Llama 3's tokenizer this saves 1 s of 2.6 s. A damaged
entry is ignored, as is a cache that cannot be written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
from tokenizers import Tokenizer, processors

import shardprep
from preprocess.make.engine import Engine
from preprocess.make.merges import without_unused_merges
from preprocess.make.probe import PROBE, gate_texts, ids_sha256, probe_texts
from preprocess.make.reference import load_tokenizer, reference_engine
from preprocess.read.formats import Texts
from preprocess.read.inputs import fetch_command
from shardprep import errors, files
from shardprep.child_process import ChildEnded, call_in_child
from shardprep.errors import ShardprepError
from shardprep.files import Digest, FileStamp
from shardprep.foreign_tokenizer import ForeignTokenizer, split_tokenizer
from shardprep.format import names
from shardprep.format.data_folder import DataFolder
from shardprep.format.names import CHAT_TEMPLATES_DIR, TOKENIZER_DIR, TOKENIZER_FILE
from shardprep.format.plan import Plan
from shardprep.format.planned_tokenizer import check_tokenizer_files, refuse_other_tokenizer
from shardprep.format.spec import TokenizerSpec, fingerprint_of
from shardprep.hub import find_on_hub, is_library_fault, no_tokenizer, words_of_fault

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MODEL_CONFIG = "config.json"
_COPIED = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, "chat_template.jinja")
# What transformers may take to load and save a tokenizer of 256,000 tokens, several times over.
_SAVE_MEMORY_BYTES = 4 << 30
_SAVE_CPU_S = 300
_MAX_ENTRY_BYTES = 2 * names.MAX_TOKENIZER_BYTES  # of an entry of the cache

Files = dict[Annotated[str, msgspec.Meta(pattern=r"\A[\w.-]+\Z")], bytes]  # contents by name


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """The facts about a tokenizer that planning needs: an entry of the cache."""

    spec: TokenizerSpec  # its description in the manifests of shards
    probe: list[str]
    probe_sha256: Digest  # of the ids of the probe
    saved: Files  # files that tasks and training load
    alteration: str  # a warning if transformers gives other ids than the model's tokenizer.json, else ""


@dataclass(frozen=True, kw_only=True)
class ResolvedTokenizer(TokenizerFacts):
    """A tokenizer whose files were also written to ``folder``."""

    files: dict[str, FileStamp]
    folder: Path
    cache_entry: Path | None
    reference: Engine  # ``tokenizers``

    def passes_gate(self, fast: Engine) -> bool:
        """Return whether an engine gives the reference's ids for ``gate_texts``. Takes 2 s for Llama 3's."""
        # If it passed before, there is an empty file beside the cache's entry.
        verdict = self.cache_entry and self.cache_entry.with_suffix(f".{fast.name}")
        with contextlib.suppress(ShardprepError):
            if verdict and files.size_of_file(verdict) is not None:
                return True
        texts = Texts.of_strings(gate_texts(self.saved[TOKENIZER_FILE]))
        ids, expected = (engine.encode(texts) for engine in (fast, self.reference))
        is_equal = ids_sha256([ids]) == ids_sha256([expected])
        if verdict and is_equal:
            with contextlib.suppress(OSError):
                verdict.touch()
        return is_equal

    def publish_first(self, folder: DataFolder) -> None:
        """Write DATA/tokenizer, before there is a plan. Raises Refused if there is another one."""
        if not folder.publish_folder(TOKENIZER_DIR, self.saved):
            refuse_other_tokenizer(folder, self.files)  # the same one may be of another planner

    def repair(self, folder: DataFolder, planned: dict[str, FileStamp]) -> None:
        """Write the files of a plan's tokenizer that are missing or damaged. Raises OtherTokenizer."""
        with contextlib.suppress(errors.OtherTokenizer, errors.NotFound, errors.BrokenShard):
            check_tokenizer_files(folder, planned)
            return
        if self.files != planned:
            expected = "the planned ones: use the planned transformers and tokenizers, or a new folder"
            path = folder.path_of(TOKENIZER_DIR)
            raise errors.OtherTokenizer(path=path, found="damaged files", expected=expected)
        folder.make_subfolder(TOKENIZER_DIR)
        for name, content in self.saved.items():
            folder.publish(f"{TOKENIZER_DIR}/{name}", content)
        check_tokenizer_files(folder, planned)  # files that the plan does not have stay, and are refused


def resolve_tokenizer(
    model_id: str, folder: Path, *, allow_special_tokens: bool, for_fast_engine: bool = False
) -> ResolvedTokenizer:
    """Find a model's tokenizer, and write its files, but no others of the model, to the empty ``folder``."""
    for each in (Path(model_id), Path(model_id, CHAT_TEMPLATES_DIR)):
        files.refuse_fifos(each)
    source = Path(model_id)
    name = model_id
    if not os.path.isdir(model_id):  # noqa: PTH112 - Path.is_dir() would raise what the file system says
        source, name = find_on_hub(model_id)
    given = read_files(source)
    entry = None
    facts = None
    loaded_as = ""
    if given is not None:
        versions = [shardprep.__version__, *map(version, ("tokenizers", "gigatoken", "transformers"))]
        depends_on = versions, allow_special_tokens, for_fast_engine, sorted(_stamps_of(given).items())
        home = os.environ.get("XDG_CACHE_HOME", "")
        cache = home if home.startswith("/") else os.path.expanduser("~/.cache")  # noqa: PTH111
        entry = Path(cache, "shardprep", "tokenizers", hashlib.sha256(repr(depends_on).encode()).hexdigest())
        # An entry is a sha256 and the facts. If they do not match, it is ignored.
        with contextlib.suppress(*files.NOT_THERE, ShardprepError, msgspec.MsgspecError):
            raw = memoryview(files.read_regular(entry, max_bytes=_MAX_ENTRY_BYTES))
            if hashlib.sha256(raw[32:]).digest() == raw[:32]:
                facts = msgspec.msgpack.decode(raw[32:], type=TokenizerFacts)
            del raw  # 20 MB for Llama 3's
    if facts is not None:
        tokenizer = ForeignTokenizer(facts.saved[TOKENIZER_FILE], model_id)
    elif given is not None and (plain := plain_files(given, model_id)) is not None:
        saved, tokenizer = plain
    else:
        saved, tokenizer, loaded_as = _saved_by_transformers(name, folder, given)
    engine = reference_engine(tokenizer, allow_special_tokens=allow_special_tokens, name=model_id)
    if facts is None:
        data = _json_object(saved, TOKENIZER_FILE)
        if dropout := (data.get("model") or {}).get("dropout"):
            found = f"model.dropout {dropout}, which gives a text other ids each time"
            raise errors.UsageError(path=model_id, found=found, expected="null, in a copy of the folder")
        vocab = tokenizer.call(_vocabulary)
        named = special_tokens_of(_json_object(saved, TOKENIZER_CONFIG))
        special_ids = {f"{role}_id": vocab.get(token) if token else None for role, token in named.items()}
        fingerprint = fingerprint_of(data)
        size = max(vocab.values()) + 1
        spec = TokenizerSpec(model_id=model_id, fingerprint=fingerprint, vocab_size=size, **special_ids)
        if for_fast_engine and (shorter := without_unused_merges(data)) is not None:
            saved[names.FAST_TOKENIZER_FILE] = shorter
        probe = probe_texts(data)
        probe_sha256 = ids_sha256([engine.encode(Texts.of_strings(probe))])
        alteration = ""
        if loaded_as:
            alteration = alteration_by(
                loaded_as,
                engine,
                saved[TOKENIZER_FILE],
                source / TOKENIZER_FILE,
                allow_special_tokens=allow_special_tokens,
            )
        facts = TokenizerFacts(
            spec=spec, probe=probe, probe_sha256=probe_sha256, saved=saved, alteration=alteration
        )
        if entry is not None:
            content = msgspec.msgpack.encode(facts)
            with contextlib.suppress(OSError, ShardprepError):
                entry.parent.mkdir(parents=True, exist_ok=True)
                files.publish_bytes(entry, hashlib.sha256(content).digest() + content)
    write_files(facts.saved, folder)
    fields = {**vars(facts), "spec": replace(facts.spec, model_id=model_id), "files": _stamps_of(facts.saved)}
    return ResolvedTokenizer(folder=folder, cache_entry=entry, reference=engine, **fields)


def _vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return vocab


def alteration_by(kind: str, engine: Engine, saved: bytes, path: Path, *, allow_special_tokens: bool) -> str:
    """Return a warning if a class of transformers gives other ids than the tokenizer.json at ``path``.

    Some classes build their own splitter, normalizer or post-processor and take only the vocabulary of the
    file. The ids of shards are those of transformers. Programs that use the file alone, such as tokenizers
    and vLLM, get others. ``engine`` and ``saved`` are the tokenizer of transformers. Takes 2 s for 128,000
    tokens.
    """
    texts = [*probe_texts(split_tokenizer(saved)[0]), *gate_texts(saved)]
    try:
        alone = load_tokenizer(path)
        reference = reference_engine(alone, allow_special_tokens=allow_special_tokens, name=str(path))
        own = reference.encode(Texts.of_strings(texts)).documents()
    except (*files.NOT_THERE, errors.ReadWriteError, errors.BadInput):
        return ""  # the file alone is of no use to anybody
    loaded = engine.encode(Texts.of_strings(texts)).documents()
    differing = []
    for text, ids, own_ids in zip(texts, loaded, own, strict=True):
        if ids.tolist() != own_ids.tolist():
            differing.append(text)
    if not differing:
        return ""
    return (
        f"transformers loads this tokenizer as a {kind}, which gives other ids than its tokenizer.json alone "
        f"for {len(differing)} of {len(texts)} sample texts, such as {differing[0][:40]!r}. The shards get "
        "the ids of transformers, as AutoTokenizer gives them. If the model was trained with tokenizer.json "
        'alone, plan with a copy of its folder that has "tokenizer_class": "PreTrainedTokenizerFast" in '
        f"{TOKENIZER_CONFIG}"
    )


def _saved_by_transformers(
    name: str, folder: Path, given: Files | None
) -> tuple[Files, ForeignTokenizer, str]:
    """Let transformers load and save a tokenizer. Returns the saved files, the tokenizer, and its class."""
    try:
        kind = call_in_child(save_tokenizer, name, folder)
    except ChildEnded as error:
        if error.exit_code in (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV):
            found = f"a tokenizer that ends its process ({error})"
            expected = f"one that takes at most {_SAVE_CPU_S} s and {_SAVE_MEMORY_BYTES >> 30} GiB to load"
            raise errors.BadInput(path=name, found=found, expected=expected) from None
        found = f"no answer from the process that loads it: {error}; run this again"
        raise errors.ReadWriteError(path=name, found=found) from None
    paths = [folder / each for each in files.names_in(folder)]
    saved = {path.name: files.read_regular(path, max_bytes=names.MAX_TOKENIZER_BYTES) for path in paths}
    # transformers silently ignores parts of a configuration that it cannot read.
    wanted = special_tokens_of(_json_object(given or saved, TOKENIZER_CONFIG))
    left = special_tokens_of(_json_object(saved, TOKENIZER_CONFIG))
    if lost := [role for role in wanted if wanted[role] and not left[role]]:
        found = f"a {TOKENIZER_CONFIG} in which transformers found no {', '.join(lost)}; run this again"
        raise errors.ReadWriteError(path=name, found=found)
    return saved, load_tokenizer(folder / TOKENIZER_FILE), kind


def _stamps_of(contents: Files) -> dict[str, FileStamp]:
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    return {name: FileStamp(num_bytes=len(contents[name]), sha256=sha256) for name, sha256 in hashes.items()}


def write_files(contents: Files, folder: Path) -> None:
    """Write the files of a tokenizer. Raises CannotWrite."""
    try:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        found = f"the tokenizer's files cannot be written there: {error.strerror}"
        raise errors.CannotWrite(path=folder, found=found, expected="some space (df; TMPDIR)") from None


def read_files(folder: Path) -> Files | None:
    """Read the files of a model that decide its tokenizer's ids, or return None if others do, too."""
    if files.is_folder(folder / CHAT_TEMPLATES_DIR):
        return None
    contents = {}
    for name in (TOKENIZER_FILE, ADDED_TOKENS, MODEL_CONFIG, *_COPIED):
        with contextlib.suppress(*files.NOT_THERE):
            contents[name] = files.read_regular(folder / name, max_bytes=names.MAX_TOKENIZER_BYTES)
            if (command := fetch_command(contents[name])) is not None:
                expected = f"the file itself; run in its repository: {command}"
                raise errors.NotFound(path=folder / name, found="a pointer to a file", expected=expected)
    return contents if TOKENIZER_FILE in contents else None


# With these classes, keys and models in the configuration, transformers 5 takes tokenizer.json as it is.
# Other keys may change ids, or have not been tested.
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
# Settings that change no ids but that a user sees. They are kept, from the configuration or the class.
_SHOWN_KEYS = ("chat_control_tokens", "processor_class", "response_schema", "response_template")
_SHOWN_ATTRIBUTES = (
    "clean_up_tokenization_spaces", "model_input_names", "model_max_length", "padding_side",
    "split_special_tokens", "truncation_side",
)  # fmt: skip


def plain_files(given: Files, name: str) -> tuple[Files, ForeignTokenizer] | None:
    """Return the files that transformers would save, and the tokenizer, or None if it might change ids."""
    try:
        data, config, model, named = (
            _json_object(given, name)
            for name in (TOKENIZER_FILE, TOKENIZER_CONFIG, MODEL_CONFIG, SPECIAL_TOKENS_MAP)
        )
        added = {str(token["id"]): token for token in data.get("added_tokens") or []}
        tokens: list[Any] = [each.get(role) for each in (config, named) for role in _NAMED]
        tokens += [token for each in (config, named) for role in _LISTED for token in each.get(role) or []]
        contents = {token["content"] if isinstance(token, dict) else token for token in tokens}
        decoder: dict[str, dict[str, Any]] = config.get("added_tokens_decoder") or {}
        if not (
            version("transformers").startswith(_PLAIN_TRANSFORMERS)
            and config.get("tokenizer_class") in _PLAIN_CLASSES
            and config.keys() <= _PLAIN_KEYS
            and model.get("model_type") in _PLAIN_MODELS
            and not model.keys() & {"tokenizer_class", "auto_map"}
            and not (ADDED_TOKENS in given or data.get("truncation") or data.get("padding"))
            and named.keys() <= {*_NAMED, *_LISTED}
            and special_tokens_of({**config, **named}) == special_tokens_of(config)
            and contents <= {None, *(token["content"] for token in added.values())}
            and all({"id": int(number), **token} == added.get(number) for number, token in decoder.items())
        ):
            return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, errors.BrokenShard):
        return None  # transformers will report what is wrong
    try:
        tokenizer = ForeignTokenizer(given[TOKENIZER_FILE], name)
    except errors.ReadWriteError:  # it is no tokenizer
        return None
    tokenizer.set_up(_add_processor)
    copied = {name: given[name] for name in _COPIED if name in given}
    # Like transformers, let tokenizers write the file.
    return {TOKENIZER_FILE: tokenizer.call(_written).encode(), **copied}, tokenizer


def _add_processor(tokenizer: Tokenizer) -> None:
    if tokenizer.post_processor is None:
        tokenizer.post_processor = processors.TemplateProcessing("$A:0", "$A:0 $B:1", special_tokens=[])


def _written(tokenizer: Tokenizer) -> str:
    return str(tokenizer.to_str(pretty=True))


def _json_object(contents: Files, name: str) -> dict[str, Any]:
    """Parse a file with a JSON object, which is empty if there is no such file. Raises BrokenShard."""
    try:
        data = orjson.loads(contents.get(name, b"{}"))
    except ValueError as error:
        raise errors.BrokenShard(f"the tokenizer's {name} is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise errors.BrokenShard(f"the tokenizer's {name} is a {type(data).__name__}, expected an object")
    return data


def save_tokenizer(model_id: str, folder: Path) -> str:
    """Save a model's tokenizer with transformers, so that it loads from ``folder`` unchanged.

    Returns the class as which transformers loaded it.

    transformers may load another tokenizer from the files that it saved, because it builds those of many
    classes from the vocabulary each time. So the saved configuration names the class that takes
    tokenizer.json as it is, and has only settings that a user sees. torch cannot be imported afterwards.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would take address space
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers  # noqa: F401  takes some of both

    from shardprep.limited_process import limit_this_process

    limit_this_process(_SAVE_MEMORY_BYTES, _SAVE_CPU_S)
    tokenizer = _auto_tokenizer(model_id)
    kind = type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        expected = "a fast one: a copy of the model with a tokenizer.json, or convert it with transformers"
        raise errors.UsageError(path=model_id, found=f"a slow tokenizer ({kind})", expected=expected)
    path = folder / TOKENIZER_CONFIG
    try:
        # Save several chat templates in tokenizer_config.json, not in a folder of their own.
        several = isinstance(getattr(tokenizer, "chat_template", None), dict)
        tokenizer.save_pretrained(str(folder), **({"save_jinja_files": False} if several else {}))
        config = json.loads(path.read_bytes())
        kept = {*_PLAIN_KEYS, *_SHOWN_KEYS, *tokenizer.special_tokens_map}
        config = {name: config[name] for name in config if name in kept}
        # The plain class does not know defaults that this class may have.
        config |= {name: getattr(tokenizer, name) for name in _SHOWN_ATTRIBUTES}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
    except Exception as error:  # tokenizers raises an Exception itself, of no other class
        found = f"its files cannot be written: {error}"
        expected = "some space (df; TMPDIR)"
        raise errors.CannotWrite(path=folder, found=found, expected=expected) from None
    # The saved files must load as the same tokenizer, and encode the same ids.
    wrong = ""
    if _auto_tokenizer(str(folder)).backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
        wrong = "whose saved files transformers loads as another tokenizer"
    # Control tokens are allowed here as by transformers, whatever the plan says.
    allow = not tokenizer.split_special_tokens
    saved = load_tokenizer(folder / TOKENIZER_FILE)
    engine = reference_engine(saved, allow_special_tokens=allow, name=model_id)
    ids = [document.tolist() for document in engine.encode(Texts.of_strings(PROBE)).documents()]
    try:
        if tokenizer(list(PROBE))["input_ids"] != ids:
            wrong = wrong or "which changes texts before its tokenizer.json encodes them"
    except Exception as error:
        wrong = f"which encodes no plain text ({words_of_fault(error)})"
    if wrong:
        expected = f"PreTrainedTokenizerFast as tokenizer_class in the {TOKENIZER_CONFIG} of a copy of it"
        raise errors.UsageError(path=model_id, found=f"a {kind}, {wrong}", expected=expected)
    return kind


def _auto_tokenizer(model_id: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
    except BaseException as error:
        if not is_library_fault(error):
            raise
        reason = words_of_fault(error)
        models = sorted(path for path in Path(model_id).glob("*.model") if path.is_file())
        if models and not (Path(model_id) / TOKENIZER_FILE).exists():
            # transformers takes any such vocabulary for one of tiktoken, which has lines of text.
            line = files.read_beginning(models[0], 1000).partition(b"\n")[0]
            is_tiktoken = re.fullmatch(rb"[A-Za-z0-9+/=]+ [0-9]+\s*", line)
            libraries = "tiktoken" if is_tiktoken else "sentencepiece protobuf"
            reason = f"only {models[0].name}; to let transformers convert it: pip install {libraries}"
        raise no_tokenizer(model_id, reason) from None
    if tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():  # transformers 5.0 makes one up
        raise no_tokenizer(model_id, f"{type(tokenizer).__name__} without a vocabulary: a file is missing")
    return tokenizer


def special_tokens_of(config: dict[str, Any]) -> dict[str, str | None]:
    """Return the BOS, EOS and pad token of a tokenizer_config.json, None for each that it does not name."""
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}


def added_ids(engine: Engine) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and after a text, found by encoding one."""
    for text in ("a", *PROBE):  # several, because a small vocabulary may drop some
        texts = Texts.of_strings([text])
        around = engine.encode(texts).ids.tolist()
        bare = engine.bare().encode(texts).ids.tolist()
        for begin in range(len(around) - len(bare) + 1):
            if bare and around[begin : begin + len(bare)] == bare:
                return around[:begin], around[begin + len(bare) :]
    return [], []


def document_ends_line(plan: Plan, engine: Engine, tokenizer_json: bytes) -> str:
    """Describe the tokens with which documents begin and end."""
    if plan.options.is_chat:
        return ""
    before, after = added_ids(engine) if plan.options.add_special_tokens else ([], [])
    if plan.end_id is not None:
        after = [*after, plan.end_id]
    if not (before or after):
        return "documents begin and end without a control token"
    head, _ = split_tokenizer(tokenizer_json)
    shown = {token["id"]: f"{token['content']} ({token['id']})" for token in head.get("added_tokens") or []}
    words = [" ".join(shown.get(each, str(each)) for each in ids) for ids in (before, after)]
    begin, end = (f"with {each}" if each else "without a control token" for each in words)
    return f"documents begin {begin} and end {end}"
