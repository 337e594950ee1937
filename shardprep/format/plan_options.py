"""The options of plan: each is declared once, with its help, group, default and whether it changes bytes.

Each field of ``PlanOptions`` or ``PrepConfig`` with a help text is a flag of ``plan``. Its ``option(...)``
declares the default, the help and further facts. The command line, the checks of values, plan.json, the
plan's id, messages about differences and docs/commands.md are built from these fields. Options of a single
process, which change no byte, are in ``preprocess/make/settings.py``.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from shardprep import errors
from shardprep.format import json_files, names
from shardprep.format.choices import AUTO, parsed_choices
from shardprep.format.spec import Record, TokenFormat
from shardprep.option import option

# How the assistant's tokens are found from its characters; see docs/conversations.md.
MaskRule = Literal["", "overlap", "char_to_token", "characters"]


EngineName = Literal["auto", "gigatoken", "tokenizers"]


SPLITS = ("train", "validation", "test")


INPUT = "input files"


TEXT = "which documents and text are kept"


TOKENS = "tokenizer"


ROWS = ("packed", "chat")  # records that are rows
TEXTS = ("documents", "packed")  # records of plain texts


_input = partial(option, group=INPUT)


_fields = partial(option, group="JSON lines and tables")


_text = partial(option, group=TEXT)


_tokens = partial(option, group=TOKENS)


_samples = partial(option, group="samples")


_chat = partial(option, group="conversations", records=("chat",))


_NOT_TEXT = re.compile("[\0\ud800-\udfff]")  # a NUL, and surrogates, which stand for bytes that are not UTF-8


ENGINE_HELP = "library that encodes; the token ids never depend on it"


BAD_HELP = "fail a shard (exit code 65) when a larger share of its documents is unusable"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options that decide the bytes of the shards. They are stored in plan.json.

    A default of None depends on the record: ``__post_init__`` fills it in, so None is in no object.
    Facts of an option, besides those of the command line:
        is_in_id: whether the plan's id depends on it. False if it only selects inputs, which are in the id.
            Defaults are not in the id either, so a new option changes no existing id.
        span: the smallest and the largest number; 0 means that the option is not set.
        records: the kinds of records that it applies to (default: all).
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
    doc: Literal["line", "file", "paragraph"] = _input(
        "line", "what a document of .txt is: a line, a file, or a paragraph, which ends at a blank line"
    )
    separator: str = _input("", "a string that ends documents of .txt, instead of --doc: '<|endoftext|>'")
    encoding: str = _input(
        "utf-8",
        "encoding of text, JSON and CSV. auto: each file is UTF-8 or else CP949, as a sample shows. "
        "'ko/*=cp949,utf-8': by patterns of paths or names",
    )
    zstd_long: int = _input(
        0,
        "read .zst files of `zstd --long=N`, N up to 31; a task then needs 2^N bytes",
        is_in_id=False,
        span=(10, 31),
        shown="27",
    )
    text_field: str = _fields(
        None,
        "field of the text, or with --record chat of the list of messages; a.b if nested. 'text,TEXT': the "
        "first that a record has. '*.parquet:content,text': by patterns of paths or names",
        shown="text, or messages",
    )
    text_template: str = _fields(
        "", r"text of several fields, instead of --text_field: '{input}\n\n{output}'", records=TEXTS
    )
    id_field: str = _fields("", "field of a document's id, which is kept in DATA/ids")
    source_field: str = _fields(
        "", "field of a document's source, for counts per source", shown="the first subfolder"
    )
    transform_files: str = _text(
        "", "files and packages next to --transform that it uses: 'words.txt,helpers.py,rules'"
    )
    limit: int = _text(
        0,
        "for a trial: take at most this many documents in total, spread evenly over shards",
        span=(1, json_files.MAX_INT64),
    )
    digests: bool = _text(False, "keep a hash of each document in DATA/digests; equal text has an equal hash")
    validation_fraction: float = _text(
        0.0,
        "hold out this fraction of documents for validation, chosen by their hashes; adds --digests",
        span=(names.MIN_FRACTION, names.MAX_FRACTION),
    )
    append_eos: bool = _tokens(None, "end documents with the EOS token", records=TEXTS, shown="on for packed")
    add_special_tokens: bool = _tokens(
        True, "add the tokenizer's special tokens, such as BOS, to each document", records=TEXTS
    )
    allow_special_tokens: bool = _tokens(
        False, "encode '<|end_of_text|>' and the like in a text as control tokens"
    )
    record: Record = _samples(
        "documents",
        "documents: one sample per document. packed: documents joined into rows of --seq_len tokens. "
        "chat: conversations in such rows, with loss masks",
    )
    seq_len: int = _samples(None, "tokens per row", shown="8192", records=ROWS)
    pack: Literal["concat", "best_fit"] = _samples(
        "concat", "concat: cut documents at row ends. best_fit: keep them whole and pad rows", records=ROWS
    )
    token_format: TokenFormat = _samples("json", "how a document's token ids are stored; rows are npy")
    keep_text: bool = _samples(
        None, "also store the text of each document", shown="on for documents", records=("documents",)
    )
    chat_format: Literal["auto", "messages", "sharegpt", "prompt", "alpaca"] = _chat(
        "auto",
        "what a record is: messages of role and content, ShareGPT's from and value, prompt and "
        "completion, or Alpaca's instruction, input and output. auto: what its fields say",
    )
    tools_field: str = _chat("tools", "field of the tools that the template gets, a list or its JSON")
    documents_field: str = _chat("documents", "field of the documents that the template gets")
    kwargs_field: str = _chat("chat_template_kwargs", "field of a record's own variables of the template")
    chat_template_kwargs: str = _chat(
        "", "variables of the template for all records, as JSON: '{\"enable_thinking\": false}'"
    )
    learn: Literal["all", "last", "each"] = _chat(
        "all",
        "answers that have labels. all: every one. last: the last one. each: every one, in documents of "
        "their own, for templates that change earlier turns. Those of weight 0 or train false have none",
    )
    learn_reasoning: Literal["yes", "no"] = _chat("yes", "no: the thoughts in answers have no labels")
    # Set by planning; these are not flags.
    transform_sha256: str = option("")  # of the function of --transform, and of its files
    chat_template: str = option("")  # its Jinja text
    chat_tool_template: str = option("")  # that of conversations with tools, if the model has another one
    chat_tokens: str = option("")  # the special tokens that a template may name, as JSON
    chat_versions: str = option("")  # of the libraries that render the template
    chat_mask_rule: MaskRule = option("")  # "characters" for a template without tags
    chat_arguments: Literal["", "objects", "strings"] = option("")  # what the template needs of tool calls
    chat_content: Literal["", "text", "parts"] = option("")  # what it needs of contents
    own_eos: bool = option(False)  # the tokenizer itself ends each document with EOS, so none is appended
    excluded: str = option("")  # sha256 of DATA/excluded.keys, the documents left out by --exclude
    # Shards with blanked documents, "0-2,5". Not in the id, because blanking moves no document.
    blanked: str = option("", is_in_id=False)
    blanked_lists: str = option("", is_in_id=False)  # sha256, see shardprep/format/blanked.py

    def __post_init__(self) -> None:
        """Check the options and fill in those that are None. Idempotent."""
        if self.text_template and self.text_field:
            raise errors.UsageError(found="--text_field and --text_template", expected="one of the two")
        for item in fields(self):
            name = item.name
            value = getattr(self, item.name)
            facts = item.metadata
            span = facts.get("span")
            records = facts.get("records", (self.record,))
            if isinstance(value, str) and _NOT_TEXT.search(value):
                raise errors.UsageError(f"--{name} is {value!r}, expected UTF-8 without a NUL")
            if span and value and not span[0] <= value <= span[1]:
                raise errors.UsageError.of_value(f"--{name}", value, f"{span[0]} to {span[1]}")
            is_given = value != item.default and bool(value or item.default)  # not a filled-in False, 0, ""
            if is_given and self.record not in records:
                # For chat, options of texts have no remedy: the chat template decides.
                remedy = None if records == TEXTS else f"--record {records[0]}"
                expected = f"--record {' or '.join(records)}, or no --{name}"
                raise errors.UsageError(found=f"--{name}", expected=expected, remedy=remedy)
        unknown = {name.strip() for name in self.split.split(",") if name} - {*SPLITS}
        if unknown:
            expected = f"some of {', '.join(SPLITS)} (valid, dev, eval in names are understood)"
            raise errors.UsageError(found=f"--split {', '.join(sorted(unknown))}", expected=expected)
        if self.separator and self.doc != "line":
            raise errors.UsageError(found="--separator and --doc", expected="one of the two")
        if self.blanked:
            names.ids_of_ranges(self.blanked)
        has_rows = self.has_rows
        is_chat = self.is_chat
        settled: dict[str, Any] = {"encoding": _python_encodings(self.encoding)}
        settled["digests"] = self.digests or self.validation_fraction > 0
        if has_rows:
            settled["token_format"] = "npy"
        if self.seq_len is None:
            settled["seq_len"] = 8192 if has_rows else 0
        if self.keep_text is None:
            settled["keep_text"] = not has_rows
        if self.append_eos is None:
            settled["append_eos"] = has_rows and not is_chat
        if self.text_template:
            settled["text_field"] = ""
        elif self.text_field is None:
            settled["text_field"] = "messages" if is_chat else "text"
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        if has_rows and not 1 <= self.seq_len <= names.MAX_SEQ_LEN:
            raise errors.UsageError.of_value("--seq_len", self.seq_len, f"1 to {names.MAX_SEQ_LEN}")

    @property
    def is_separated(self) -> bool:
        """Return whether documents of .txt stand between separators: blank lines, or --separator."""
        return self.doc == "paragraph" or bool(self.separator)

    @property
    def is_chat(self) -> bool:
        """Return whether documents are conversations, rendered by a chat template."""
        return self.record == "chat"

    @property
    def has_rows(self) -> bool:
        """Return whether a sample is a row of ``seq_len`` tokens."""
        return self.record != "documents"

    @property
    def encodes_control_tokens(self) -> bool:
        """Return whether control tokens in a text are encoded as such, which chat templates need."""
        return self.allow_special_tokens or self.is_chat

    def side_files(self) -> list[str]:
        """Return the optional files of a shard that these options ask for, by their keys in its manifest."""
        wanted = {"ids": self.id_field, "digests": self.digests}
        return [name for name, is_wanted in wanted.items() if is_wanted]

    def identity(self) -> dict[str, object]:
        """Return the options that the plan's id is a hash of."""
        in_id = {item.name for item in PLAN_FIELDS if item.metadata.get("is_in_id", True)}
        return {name: value for name, value in self.non_defaults().items() if name in in_id}

    def non_defaults(self) -> dict[str, object]:
        """Return the options that differ from the defaults for this kind of records."""
        defaults = {**vars(PlanOptions(record=self.record)), "record": "documents"}
        return {name: value for name, value in vars(self).items() if value != defaults[name]}


PLAN_FIELDS = fields(PlanOptions)


@dataclass(frozen=True, kw_only=True)
class PrepConfig(PlanOptions):
    """All options of ``plan``."""

    input_dir: Path = _input(Path("/data/raw"), "folder of the raw input files")
    hash_inputs: bool = _input(False, "hash the whole input when planning, so that workers detect any change")
    model_id: str = _tokens("meta-llama/Meta-Llama-3-8B", "folder of a tokenizer, or its name on the hub")
    chat_template_file: Path | None = _tokens(
        None, "with --record chat, Jinja template to use", records=("chat",), shown="the tokenizer's own"
    )
    engine: EngineName = _tokens("auto", ENGINE_HELP)
    max_bad_fraction: float = _text(0.01, BAD_HELP, span=(0, 1))
    transform: Path | None = _text(
        None, "Python file whose function transform(record) returns the text, or None to leave it out"
    )
    exclude: Path | None = _text(
        None, "list of documents to leave out, one per line: ids of --id_field, or sha256:HEX of texts"
    )
    output_dir: Path = option(Path("/data/processed"), "folder of the data set", group="output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.follow_links and not self.recursive:
            raise errors.UsageError(found="--follow_links", expected="--recursive, too", remedy="--recursive")
        if self.is_chat and self.engine not in ("auto", "tokenizers"):
            found = f"--engine {self.engine}"
            remedy = "--engine tokenizers"
            raise errors.UsageError(found=found, expected=f"{remedy}, for loss masks", remedy=remedy)
        if self.limit and self.hash_inputs:
            raise errors.UsageError(found="--limit --hash_inputs", expected="one of them")


def option_differences(planned: PlanOptions, now: PlanOptions, given: set[str] | None = None) -> list[str]:
    """Describe how options differ. With ``given``, only these options, and only if the id depends on them."""
    differences = []
    for item in PLAN_FIELDS:
        before = getattr(planned, item.name)
        after = getattr(now, item.name)
        is_compared = given is None or (item.name in given and item.metadata.get("is_in_id", True))
        if is_compared and before != after:
            differences.append(_difference(item.name, before, after))
    return differences


# Options that are not flags -> what the user gave.
_WHAT_IS_GIVEN = {
    "transform_sha256": "the function of --transform",
    "excluded": "the list of --exclude",
    "chat_template": "the chat template",
    "chat_tool_template": "the chat template of conversations with tools",
    "chat_tokens": "the special tokens of the chat template",
    "chat_versions": "the libraries that render the chat template",
    "chat_mask_rule": "the rule of the loss masks",
    "chat_arguments": "the form of tool calls' arguments",
    "chat_content": "the form of contents",
    "own_eos": "the tokenizer's own EOS",
    "blanked": "the list of blanked documents",
    "blanked_lists": "the list of blanked documents",
}


def _difference(name: str, before: object, after: object) -> str:
    """Describe how an option differs. Hashes and templates are not shown."""
    if name not in _WHAT_IS_GIVEN:
        return f"{_as_flag(name, before)} (you asked for {_as_flag(name, after)})"
    if not before:
        return f"{_WHAT_IS_GIVEN[name]} was not set before"
    return f"{_WHAT_IS_GIVEN[name]} differs" if after else f"{_WHAT_IS_GIVEN[name]} is not set now"


def _as_flag(name: str, value: object) -> str:
    """Return how a message calls the value of a flag."""
    if value is True:
        return f"--{name}"
    if value is None or value is False or value == "":
        return f"no --{name}"
    return f"--{name} {value}"


def flags_of(options: PlanOptions) -> list[str]:
    """Return the flags that give these options."""
    # --seq_len is named even if it is the default.
    given = options.non_defaults() | ({"seq_len": options.seq_len} if options.has_rows else {})
    words = []
    for item in PLAN_FIELDS:
        name = item.name
        value = given.get(item.name, "")
        if not item.metadata["help"] or value == "":
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


def _python_encodings(option: str) -> str:
    """Return Python's names of the codecs of --encoding. Raises UsageError as ``_python_encoding``."""
    codecs_of: list[str] = []
    for pattern, name in parsed_choices(option, "=") or [("", option)]:
        codec = name if name == AUTO else _python_encoding(name)
        codecs_of.append(f"{pattern}={codec}" if pattern else codec)
    return ",".join(codecs_of)


def _python_encoding(name: str) -> str:
    """Return Python's name of a codec. Raises UsageError if line ends cannot be found in its bytes."""
    ascii_bytes = bytes(range(128))
    no_ascii = ("utf-16", "utf-32", "iso2022", "hz", "utf-7", "idna", "unicode-escape", "raw-unicode-escape")
    try:
        codec = codecs.lookup(name).name
        if not codec.startswith(no_ascii) and ascii_bytes.decode(codec) == ascii_bytes.decode("ascii"):
            return codec
    except (LookupError, ValueError, TypeError):  # a NUL in the name is a ValueError, too
        raise errors.UsageError.of_value("--encoding", name, "one such as utf-8 or cp949") from None
    expected = "a superset of ASCII, in whose bytes line ends can be found"
    advice = "convert the files first"
    raise errors.UsageError(
        found=f"--encoding {name}", expected=expected, advice=advice, remedy=f"iconv -f {name} -t utf-8"
    )
