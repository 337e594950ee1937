"""The options of a data set, each declared once.

A field of ``PlanOptions`` or ``PrepConfig`` is a flag of ``plan``. Its ``option(...)`` says the default, the
help, the group that it is listed in, and what plan.json keeps of it. The command line, the checks of values,
plan.json, the plan's id, the messages about differences and docs/commands.md are made from these fields.
The options of one process, which change no byte, are in ``preprocess/make/resources.py``.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardprep.command_line import option
from shardprep.errors import UsageError
from shardprep.format.names import LEAST_FRACTION, MAX_SEQ_LEN, MOST, MOST_FRACTION, Record, TokenFormat

Doc = Literal["line", "file"]
Pack = Literal["concat", "best_fit"]
# Which tokens the assistant wrote, given its characters; see docs/training_data.md.
MaskRule = Literal["", "overlap", "char_to_token", "characters"]
EngineName = Literal["auto", "gigatoken", "tokenizers"]

SPLITS = ("train", "validation", "test")
INPUT = "input files"
FIELDS = "JSON lines and tables"
TEXT = "which documents and text are kept"
TOKENS = "tokenizer"
SAMPLES = "samples"
OUTPUT = "output"
RESOURCES = "resources"
GROUPS = (INPUT, FIELDS, TEXT, TOKENS, SAMPLES, OUTPUT, RESOURCES)

_input = functools.partial(option, group=INPUT)
_fields = functools.partial(option, group=FIELDS)
_text = functools.partial(option, group=TEXT)
_tokens = functools.partial(option, group=TOKENS)
_samples = functools.partial(option, group=SAMPLES)
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")  # a NUL, and what stands for a byte that is no UTF-8
ENGINE_HELP = "library that encodes; the token ids never depend on it"
BAD_HELP = "fail a shard (exit code 65) when a larger share of its documents is unusable"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options that decide the bytes of the shards; plan.json keeps them.

    Facts of an option, beside those of the command line:
        is_in_id: False where the plan's id leaves it out, because it only finds inputs, which the id names.
            Of the others the id has those that are not the default, so a new option changes no older id.
        span: the least and the largest number; 0 stands for none.
        of: ``rows``, ``chat`` or ``texts`` (documents and packed), where it is for these records only.
    """

    recursive: bool = _input(False, "also take the input files of subfolders")
    follow_links: bool = _input(
        False, "with --recursive, also follow links to folders, each folder once", is_in_id=False
    )
    also: str = _input("", "also take files of these names, as plain text: '*.md,README.txt'", is_in_id=False)
    split: str = _input(
        "",
        "take only the files of these splits, by their names: 'train,validation'",
        is_in_id=False,
        shown="all",
    )
    doc: Doc = _input("line", "what a document of .txt is: a line or a file")
    encoding: str = _input("utf-8", "encoding of .txt; utf-8-sig drops a leading byte order mark")
    zstd_long: int = _input(
        0,
        "read .zst files of `zstd --long=N`, N up to 31; a task then holds 2^N bytes",
        is_in_id=False,
        span=(10, 31),
        shown="27",
    )
    text_field: str = _fields(
        None,
        "field of the text, or with --record chat of the list of messages; a.b if nested",
        shown="text, or messages",
    )
    text_template: str = _fields(
        "", r"text of several fields, instead of --text_field: '{input}\n\n{output}'", of="texts"
    )
    id_field: str = _fields("", "field of a document's id, which is kept in DATA/ids")
    source_field: str = _fields(
        "", "field of a document's source, for counts per source", shown="the first subfolder"
    )
    transform_files: str = _text("", "files beside --transform that it uses: 'words.txt,helpers.py'")
    limit: int = _text(
        0, "for a trial: take at most this many documents in total, spread evenly over shards", span=(1, MOST)
    )
    digests: bool = _text(False, "keep a hash of each document in DATA/digests; equal text has an equal hash")
    validation_fraction: float = _text(
        0.0,
        "hold out this part of the documents for validation, chosen by their hashes; adds --digests",
        span=(LEAST_FRACTION, MOST_FRACTION),
    )
    append_eos: bool = _tokens(None, "end documents with the EOS token", of="texts", shown="on for packed")
    add_special_tokens: bool = _tokens(
        True, "put around each document what the tokenizer does, such as BOS", of="texts"
    )
    allow_special_tokens: bool = _tokens(
        False, "let '<|end_of_text|>' and the like in a text become control tokens"
    )
    record: Record = _samples(
        "documents",
        "documents: one sample per document. packed: documents joined into rows of --seq_len tokens. "
        "chat: conversations in such rows, with loss masks",
    )
    seq_len: int = _samples(None, "tokens per row", shown="8192", of="rows")
    pack: Pack = _samples(
        "concat", "concat: cut documents at row ends. best_fit: keep them whole and pad rows", of="rows"
    )
    token_format: TokenFormat = _samples("json", "how a document's token ids are stored; rows are npy")
    keep_text: bool = _samples(None, "also store the text of each document", shown="on for documents")
    # What planning finds out; no flags.
    transform_sha256: str = option("")  # of the function of --transform, and of its files
    chat_template: str = option("")  # its Jinja text
    chat_tokens: str = option("")  # the special tokens that a template may name, as JSON
    chat_versions: str = option("")  # of the libraries that render it
    chat_mask_rule: MaskRule = option("")  # of transformers at planning; characters without tags
    own_eos: bool = option(False)  # the tokenizer ends each document with EOS by itself, so none is appended
    excluded: str = option("")  # sha256 of DATA/excluded.keys, whose documents are left out: see --exclude
    # Shards of which documents are blanked, "0-2,5"; not in the id, for blanking moves nothing.
    blanked: str = option("", is_in_id=False)

    def __post_init__(self) -> None:
        """Check the options and settle those that are None. A settled object passes unchanged."""
        self._check()
        if unknown := {name.strip() for name in self.split.split(",") if name} - {*SPLITS}:
            expected = f"some of {', '.join(SPLITS)}, as which valid, dev and eval in names of files count"
            raise UsageError(found=f"--split {', '.join(sorted(unknown))}", expected=expected)
        has_rows, is_chat = self.has_rows, self.is_chat
        settled = {
            "encoding": _python_encoding(self.encoding),
            "seq_len": 0 if not has_rows else 8192 if self.seq_len is None else self.seq_len,
            "token_format": "npy" if has_rows else self.token_format,
            "digests": self.digests or self.validation_fraction > 0,
            "keep_text": not has_rows if self.keep_text is None else self.keep_text,
            "append_eos": has_rows and not is_chat if self.append_eos is None else self.append_eos,
        }
        if self.text_field is None or self.text_template:
            settled["text_field"] = "" if self.text_template else "messages" if is_chat else "text"
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        if has_rows and not 1 <= self.seq_len <= MAX_SEQ_LEN:
            raise UsageError.of_value("--seq_len", self.seq_len, f"1 to {MAX_SEQ_LEN}")

    @property
    def is_chat(self) -> bool:
        """Return whether a document is a conversation, rendered by a chat template."""
        return self.record == "chat"

    @property
    def has_rows(self) -> bool:
        """Return whether a sample is a row of ``seq_len`` tokens."""
        return self.record != "documents"

    @property
    def encodes_control_tokens(self) -> bool:
        """Return whether control tokens written out in a text become such: a chat template's have to."""
        return self.allow_special_tokens or self.is_chat

    def side_files(self) -> list[str]:
        """Return the files of a shard that only some options ask for, by their names in its manifest."""
        wanted = {"ids": self.id_field, "digests": self.digests}
        return [name for name, is_wanted in wanted.items() if is_wanted]

    def identity(self) -> dict[str, Any]:
        """Return what of them the plan's id is a hash of."""
        kept = {}
        usual = {**vars(PlanOptions(record=self.record)), "record": "documents"}
        for item in PLAN_FIELDS:
            value = getattr(self, item.name)
            if item.metadata.get("is_in_id", True) and value != usual[item.name]:
                kept[item.name] = value
        return kept

    def _check(self) -> None:
        """Refuse a value that cannot be, or that this record does not have. Raises UsageError."""
        if self.text_template and self.text_field:
            raise UsageError(found="--text_field and --text_template", expected="one of the two")
        if self.has_rows and self.keep_text:
            raise _wrong_record("keep_text", "documents, as packed rows hold no text", "--record documents")
        has = {"rows": self.has_rows, "chat": self.is_chat, "texts": not self.is_chat}
        for item in dataclasses.fields(self):
            name, value, facts = item.name, getattr(self, item.name), item.metadata
            span, of = facts.get("span"), facts.get("of")
            if isinstance(value, str) and _NOT_TEXT.search(value):
                raise UsageError(f"--{name} is {value!r}, expected UTF-8 without a NUL")
            if span and value and not span[0] <= value <= span[1]:
                raise UsageError.of_value(f"--{name}", value, f"{span[0]} to {span[1]}")
            is_given = value != item.default and bool(value or item.default)
            if of and is_given and not has[of]:
                raise _wrong_record(name, *_MEANT[of])


# What the records are for which an option is, and what asks for them.
_MEANT = {
    "rows": ("packed rows", "--record packed"),
    "chat": ("conversations", "--record chat"),
    "texts": ("texts, and a template alone decides how a conversation reads", None),
}


def _wrong_record(name: str, meant: str, remedy: str | None) -> UsageError:
    """Return the error of an option that is for another record."""
    todo = f"add {remedy}, or leave it out" if remedy else "leave it out"
    return UsageError(f"--{name} is for {meant}; {todo}", found=f"--{name}", remedy=remedy)


PLAN_FIELDS = dataclasses.fields(PlanOptions)


@dataclass(frozen=True, kw_only=True)
class PrepConfig(PlanOptions):
    """All options of ``plan``."""

    input_dir: Path = _input(Path("/data/raw"), "folder of the raw input files")
    hash_inputs: bool = _input(
        False, "hash the whole input when planning, so that workers detect any change of it"
    )
    model_id: str = _tokens("meta-llama/Meta-Llama-3-8B", "folder of a tokenizer, or its name on the hub")
    chat_template_file: Path | None = _tokens(
        None, "with --record chat, Jinja template to use", of="chat", shown="the tokenizer's own"
    )
    engine: EngineName = _tokens("auto", ENGINE_HELP)
    max_bad_fraction: float = _text(0.01, BAD_HELP)
    transform: Path | None = _text(
        None, "Python file whose function transform(record) returns the text, or None to leave it out"
    )
    exclude: Path | None = _text(
        None, "list of documents to leave out: ids of --id_field, or sha256:HEX of texts, one per line"
    )
    output_dir: Path = option(Path("/data/processed"), "folder of the data set", group=OUTPUT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.follow_links and not self.recursive:
            expected = "--recursive with it, as it is for subfolders, or neither"
            raise UsageError(found="--follow_links", expected=expected, remedy="--recursive")
        if not 0 <= self.max_bad_fraction <= 1:
            raise UsageError.of_value("--max_bad_fraction", self.max_bad_fraction, "0 to 1")
        if self.is_chat and self.engine not in ("auto", "tokenizers"):
            remedy = "--engine tokenizers"
            expected = f"{remedy}, which tells the places of tokens for loss masks, or none"
            raise UsageError(found=f"--engine {self.engine}", expected=expected, remedy=remedy)
        if self.limit and self.hash_inputs:
            raise UsageError(found="--limit --hash_inputs", expected="one: a part of the input, or all of it")

    def plan_options(self) -> PlanOptions:
        """Return the options without where things are and how they are checked."""
        return PlanOptions(**{item.name: getattr(self, item.name) for item in PLAN_FIELDS})


def option_differences(planned: PlanOptions, now: PlanOptions, names: set[str] | None = None) -> list[str]:
    """Return how options differ, in words. Of ``names`` only those that change bytes."""
    return [
        f"--{item.name} was {before}, now {after}"
        for item in PLAN_FIELDS
        if (before := getattr(planned, item.name)) != (after := getattr(now, item.name))
        and (names is None or (item.name in names and item.metadata.get("is_in_id", True)))
    ]


def flags_of(options: PlanOptions) -> list[str]:
    """Return the words of a command line that give these options."""
    usual = {**vars(PlanOptions(record=options.record)), "record": "documents", "seq_len": 0}
    words = []
    for item in PLAN_FIELDS:
        name, value = item.name, getattr(options, item.name)
        if not item.metadata["help"] or value in ("", usual[name]):
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


def _python_encoding(name: str) -> str:
    """Return Python's name of a codec. Raises UsageError where lines cannot be told apart as bytes."""
    ascii_bytes = bytes(range(128))
    disguised = ("utf-16", "utf-32", "iso2022", "hz", "utf-7", "idna", "unicode-escape", "raw-unicode-escape")
    try:
        known = codecs.lookup(name).name
        if not known.startswith(disguised) and ascii_bytes.decode(known) == ascii_bytes.decode("ascii"):
            return known
    except (LookupError, ValueError, TypeError):  # a NUL in the name is a ValueError, too
        raise UsageError(found=f"--encoding {name}", expected="an encoding, such as utf-8 or cp949") from None
    expected = "a superset of ASCII, in whose bytes line ends can be found; convert the files first"
    raise UsageError(found=f"--encoding {name}", expected=expected, remedy=f"iconv -f {name} -t utf-8")
