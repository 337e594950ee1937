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
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

import shardprep
from preprocess.make.engine import Engine
from preprocess.make.merges import without_unused_merges
from preprocess.make.probe import PROBE, gate_texts, ids_sha256, probe_texts
from preprocess.make.reference import load_tokenizer, reference_engine
from preprocess.plan.model_files import (
    TOKENIZER_CONFIG,
    Files,
    json_object,
    read_files,
    special_tokens_of,
    write_files,
)
from preprocess.plan.plain_tokenizer import plain_files
from preprocess.plan.saved_tokenizer import SAVE_CPU_S, SAVE_MEMORY_BYTES, save_tokenizer
from preprocess.read.formats import Texts
from shardprep import errors, files, publishing
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
from shardprep.hub import find_on_hub

_MAX_ENTRY_BYTES = 2 * names.MAX_TOKENIZER_BYTES  # of an entry of the cache


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
        data = json_object(saved, TOKENIZER_FILE)
        dropout = (data.get("model") or {}).get("dropout")
        if dropout:
            found = f"model.dropout {dropout}, which gives a text other ids each time"
            raise errors.UsageError(path=model_id, found=found, expected="null, in a copy of the folder")
        vocab = tokenizer.call(_vocabulary)
        named = special_tokens_of(json_object(saved, TOKENIZER_CONFIG))
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
                publishing.publish_bytes(entry, hashlib.sha256(content).digest() + content)
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
            expected = f"one that takes at most {SAVE_CPU_S} s and {SAVE_MEMORY_BYTES >> 30} GiB to load"
            raise errors.BadInput(path=name, found=found, expected=expected) from None
        found = f"no answer from the process that loads it: {error}; run this again"
        raise errors.ReadWriteError(path=name, found=found) from None
    paths = [folder / each for each in files.names_in(folder)]
    saved = {path.name: files.read_regular(path, max_bytes=names.MAX_TOKENIZER_BYTES) for path in paths}
    # transformers silently ignores parts of a configuration that it cannot read.
    wanted = special_tokens_of(json_object(given or saved, TOKENIZER_CONFIG))
    left = special_tokens_of(json_object(saved, TOKENIZER_CONFIG))
    lost = [role for role in wanted if wanted[role] and not left[role]]
    if lost:
        found = f"a {TOKENIZER_CONFIG} in which transformers found no {', '.join(lost)}; run this again"
        raise errors.ReadWriteError(path=name, found=found)
    return saved, load_tokenizer(folder / TOKENIZER_FILE), kind


def _stamps_of(contents: Files) -> dict[str, FileStamp]:
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    return {name: FileStamp(num_bytes=len(contents[name]), sha256=sha256) for name, sha256 in hashes.items()}


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
    before: list[int] = []
    after: list[int] = []
    if plan.options.add_special_tokens:
        before, after = added_ids(engine)
    if plan.end_id is not None:
        after = [*after, plan.end_id]
    if not (before or after):
        return "documents begin and end without a control token"
    head, _ = split_tokenizer(tokenizer_json)
    content_of = {token["id"]: token["content"] for token in head.get("added_tokens") or []}
    begin = _control_tokens(before, content_of)
    end = _control_tokens(after, content_of)
    return f"documents begin {begin} and end {end}"


def _control_tokens(ids: Sequence[int], content_of: Mapping[int, str]) -> str:
    if not ids:
        return "without a control token"
    shown = [f"{content_of[each]} ({each})" if each in content_of else str(each) for each in ids]
    return f"with {' '.join(shown)}"
