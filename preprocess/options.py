"""What a user can choose: dataclasses whose fields are the flags of the commands.

PrepConfig describes a data set. The part of it that decides the bytes of the shards is BytesOptions, which
plan.json keeps. WorkerSettings are for one process and change no byte of a shard.
"""

from __future__ import annotations

import codecs
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from preprocess.formats.text_fields import MessageFields, Normalize, TextChanges, TextFields, text_versions
from preprocess.resources import batch_bytes_within, most_batches_within
from shardprep.errors import Refused, UsageError
from shardprep.format.checked_json import MOST
from shardprep.format.names import Record, TokenFormat

Doc = Literal["line", "file"]
Pack = Literal["concat", "best_fit"]
EngineName = Literal["auto", "fastokens", "tokenizers"]


@dataclass(frozen=True, kw_only=True)
class BytesOptions:
    """The options that decide the bytes of the shards, without open defaults, as plan.json keeps them.

    The order of the fields is their order in plan.json. See PrepConfig for their meaning.
    """

    recursive: bool
    doc: Doc
    encoding: str  # Python's own name of the codec
    record: Record
    seq_len: int  # tokens per packed row; 0 unless packed
    pack: Pack
    token_format: TokenFormat
    keep_text: bool
    append_eos: bool
    allow_special_tokens: bool
    text_field: str = "text"  # "" with a template
    text_template: str = ""
    id_field: str = ""
    source_field: str = ""
    fix_text: bool = False
    normalize: Normalize = ""
    min_chars: int = 0
    max_chars: int = 0  # 0: no limit
    limit: int = 0  # 0: no limit
    text_versions: str = ""  # of the libraries that change text, see text_fields.py
    messages_field: str = ""  # of conversations, "" for other records
    chat_template: str = ""  # its Jinja text
    chat_tokens: str = ""  # the special tokens that a template may name, as JSON
    chat_versions: str = ""  # of the libraries that render it, see chat_rendering.py
    also: str = ""  # the patterns of --also that took an input
    follow_links: bool = False  # a link to a folder was followed
    zstd_long: int = 0  # log2 of the largest window of zstd; 0: that of zstd itself

    @property
    def is_chat(self) -> bool:
        """Whether a document is a conversation, rendered by a chat template."""
        return self.record == "chat"

    @property
    def encodes_control_tokens(self) -> bool:
        """Whether control tokens written out in a text become control tokens: a chat template's have to."""
        return self.allow_special_tokens or self.is_chat

    def identity(self) -> dict[str, Any]:
        """What of them a plan's id is a hash of: an option that came later counts only where it is used.

        How the inputs were found and opened does not count: the inputs themselves do.
        """
        values = dataclasses.asdict(self)
        return {
            item.name: values[item.name]
            for item in dataclasses.fields(self)
            if item.name not in INPUT_OPTIONS
            and (item.default is dataclasses.MISSING or values[item.name] != item.default)
        }

    def text_fields(self) -> TextFields:
        """What of a record is the text. Raises UsageError where the names or the template are none."""
        if self.messages_field:
            return MessageFields(self.messages_field, self.id_field, self.source_field)
        return TextFields(self.text_field, self.text_template, self.id_field, self.source_field)

    def text_changes(self) -> TextChanges | None:
        """What is done to the texts; None for nothing."""
        changes = TextChanges(
            fix_text=self.fix_text,
            normalize=self.normalize,
            min_chars=self.min_chars,
            max_chars=self.max_chars,
        )
        return None if changes == TextChanges() else changes

    @property
    def files_can_be_split(self) -> bool:
        """Whether a shard may begin at a line end inside a .txt file.

        Not where a document is a whole file, and not in UTF-16/32.
        """
        return self.doc == "line" and not self.encoding.startswith(("utf-16", "utf-32"))


@dataclass(frozen=True, kw_only=True)
class PrepConfig:
    """Options of a data set. Each field is a flag; those of BytesOptions decide the bytes of the shards."""

    input_dir: Path = field(default=Path("/data/raw"), metadata={"help": "folder of the raw input files"})
    output_dir: Path = field(default=Path("/data/processed"), metadata={"help": "folder of the data set"})
    model_id: str = field(
        default="meta-llama/Meta-Llama-3-8B", metadata={"help": "tokenizer: a folder or a name on the hub"}
    )
    recursive: bool = field(default=False, metadata={"help": "take the input files of subfolders, too"})
    follow_links: bool = field(
        default=False, metadata={"help": "with --recursive: also of links to folders, each folder once"}
    )
    also: str | None = field(
        default=None,
        metadata={"help": "take these names, too, of unknown suffixes as plain text: '*.md,README.txt'"},
    )
    doc: Doc = field(default="line", metadata={"help": "what a document of .txt is: a line, or a whole file"})
    encoding: str = field(
        default="utf-8", metadata={"help": "of .txt; utf-8-sig drops a leading byte order mark"}
    )
    zstd_long: int | None = field(
        default=None,
        metadata={"help": "take .zst of zstd --long=N, N up to 31; a task holds 2^N bytes (default 27)"},
    )
    text_field: str | None = field(
        default=None,
        metadata={"help": "field of the text in JSON lines and rows, a.b for nesting (default text)"},
    )
    text_template: str | None = field(
        default=None, metadata={"help": r"text of several fields, in place of one: '{input}\n\n{output}'"}
    )
    id_field: str | None = field(
        default=None, metadata={"help": "field of a document's id, which is kept in DATA/ids"}
    )
    source_field: str | None = field(
        default=None,
        metadata={"help": "field of a document's source, to count by (default: the first subfolder)"},
    )
    fix_text: bool = field(
        default=False,
        metadata={"help": "mend text that was read in a wrong encoding (ftfy), if wholly; else leave it out"},
    )
    normalize: Normalize | None = field(default=None, metadata={"help": "Unicode normalization of the text"})
    min_chars: int | None = field(default=None, metadata={"help": "leave out shorter documents"})
    max_chars: int | None = field(default=None, metadata={"help": "leave out longer documents"})
    limit: int | None = field(
        default=None, metadata={"help": "a trial: so many documents at most, of all shards evenly"}
    )
    record: Record = field(
        default="documents",
        metadata={"help": "a sample per document; documents in rows; conversations in rows"},
    )
    seq_len: int | None = field(default=None, metadata={"help": "tokens per packed row (default 8192)"})
    token_format: TokenFormat = field(
        default="json", metadata={"help": "member type of a document's ids; packed rows are npy"}
    )
    keep_text: bool | None = field(
        default=None, metadata={"help": "store each document's text, too (default, unless packed)"}
    )
    pack: Pack = field(
        default="concat",
        metadata={"help": "rows: concat cuts documents at row ends; best_fit keeps them whole, padded"},
    )
    append_eos: bool | None = field(
        default=None, metadata={"help": "end each document with the EOS token (default when packed)"}
    )
    allow_special_tokens: bool = field(
        default=False, metadata={"help": "let '<|end_of_text|>' and the like in a text become control tokens"}
    )
    messages_field: str | None = field(
        default=None, metadata={"help": "of chat: the field with the list of messages (default messages)"}
    )
    chat_template_file: Path | None = field(
        default=None, metadata={"help": "of chat: a file with a Jinja template, in place of the tokenizer's"}
    )
    max_bad_fraction: float = field(
        default=0.01, metadata={"help": "share of documents left out as bad above which a shard fails (65)"}
    )
    engine: EngineName = field(default="auto", metadata={"help": "what encodes; the ids never depend on it"})
    hash_inputs: bool = field(
        default=False, metadata={"help": "hash the whole input when planning; workers compare what they read"}
    )

    def __post_init__(self) -> None:
        self._check_texts()
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise UsageError(f"--{name} is {value!r}, expected one of {', '.join(choices)}")
        if self.follow_links and not self.recursive:
            raise UsageError("--follow_links is for subfolders; add --recursive, or leave it out")
        if not 0 <= self.max_bad_fraction <= 1:
            raise UsageError(f"--max_bad_fraction is {self.max_bad_fraction}, expected 0 to 1")
        has_rows = self.record != "documents"
        if not has_rows and self.seq_len is not None:
            raise UsageError("--seq_len is for packed rows; add --record packed, or leave it out")
        if not has_rows and self.pack != "concat":
            raise UsageError(f"--pack {self.pack} is for packed rows; add --record packed, or leave it out")
        if has_rows and self.keep_text:
            raise UsageError("--keep_text is for documents; packed rows hold no text")
        seq_len = 0 if not has_rows else 8192 if self.seq_len is None else self.seq_len
        if has_rows and not 1 <= seq_len <= 2**27:
            raise UsageError(f"--seq_len is {seq_len}, expected 1 to {2**27}")
        is_chat = self.record == "chat"
        self._check_chat(is_chat)
        resolved = {
            "seq_len": seq_len,
            "token_format": "npy" if has_rows else self.token_format,
            "keep_text": not has_rows if self.keep_text is None else self.keep_text,
            "append_eos": has_rows and not is_chat if self.append_eos is None else self.append_eos,
            "encoding": _known_encoding(self.encoding),
            "text_field": "" if is_chat else self._resolved_text_field(),
            "messages_field": self.messages_field or ("messages" if is_chat else ""),
            **{name: getattr(self, name) or "" for name in _TEXTS_OR_NONE},
            **{name: getattr(self, name) or 0 for name in _LIMITS},
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        self._check_limits()
        self.bytes_options().text_fields()  # which says what is wrong with a name or a template

    def _check_texts(self) -> None:
        """Refuse what no path and no plan.json can hold: a NUL; in a text also what is no UTF-8."""
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (str, Path)) and "\0" in str(value):
                raise UsageError(f"--{item.name} is {str(value)!r}, which holds a NUL; leave that out")
            if isinstance(value, str) and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise UsageError(
                        f"--{item.name} is {value!r}, which is not UTF-8; type it in a UTF-8 terminal"
                    ) from None

    def _resolved_text_field(self) -> str:
        if self.text_template and self.text_field:
            raise UsageError(
                "--text_field and --text_template are two ways to say the same; give one of them"
            )
        return "" if self.text_template else "text" if self.text_field is None else self.text_field

    def _check_chat(self, is_chat: bool) -> None:
        """That only chat has options of chat, and chat none that change a text or end a document."""
        others = ("messages_field", "chat_template_file")
        if not is_chat:
            if given := [name for name in others if getattr(self, name)]:
                raise UsageError(f"--{given[0]} is for conversations; add --record chat, or leave it out")
            return
        if self.engine == "fastokens":
            raise UsageError("--engine fastokens tells no places of tokens, which a loss mask needs")
        if self.messages_field == "":
            raise UsageError("--messages_field is empty, expected the name of a field, such as messages")
        given = [name for name in _NOT_OF_CHAT if getattr(self, name)]
        if given:
            raise UsageError(
                f"--{given[0]} is for texts; the template alone decides how a conversation reads and ends: "
                "leave it out with --record chat"
            )

    def _check_limits(self) -> None:
        for name in _LIMITS:
            if not 0 <= getattr(self, name) <= MOST:
                raise UsageError(f"--{name} is {getattr(self, name)}, expected 1 to {MOST}")
        if self.zstd_long and not 10 <= self.zstd_long <= 31:
            raise UsageError(f"--zstd_long is {self.zstd_long}, expected 10 to 31, as of zstd --long")
        if self.max_chars and (self.max_chars or 0) < (self.min_chars or 0):
            raise UsageError(f"--max_chars {self.max_chars} is below --min_chars {self.min_chars}")
        if self.limit and self.hash_inputs:
            raise UsageError(
                "--limit reads a part of the input, --hash_inputs all of it; leave out one of them"
            )

    @property
    def text_versions(self) -> str:
        """The versions of what changes text, here. Raises UsageError where a library is missing."""
        return text_versions(fix_text=self.fix_text, normalize=self.normalize or "")

    def bytes_options(self) -> BytesOptions:
        """The options that decide the bytes of the shards; planning adds CHAT_FACTS."""
        names = [item.name for item in dataclasses.fields(BytesOptions) if item.name not in CHAT_FACTS]
        return BytesOptions(**{name: getattr(self, name) for name in names})

    @staticmethod
    def of_bytes_options(options: BytesOptions, **other: Any) -> PrepConfig:
        """These options and ``other`` ones. Raises UsageError where they do not go together."""
        return PrepConfig(**{**flags_of(options), **other})


def check_text_versions(options: BytesOptions) -> None:
    """That what changes text is here in the plan's versions. Raises Refused, or UsageError."""
    found = text_versions(fix_text=options.fix_text, normalize=options.normalize)
    if found != options.text_versions:
        raise Refused(
            f"the plan changes text with {options.text_versions or 'nothing'}, here {found}: another "
            "version may give another text; use the Python and the libraries that planned, or plan anew"
        )


def flags_of(options: BytesOptions) -> dict[str, Any]:
    """The options as the flags that give them."""
    given = dataclasses.asdict(options)
    for name in ("text_versions", *CHAT_FACTS):
        del given[name]
    or_none = {name: given[name] or None for name in ("seq_len", "text_field", "messages_field")}
    return {**given, **or_none}


INPUT_OPTIONS = ("also", "follow_links", "zstd_long")  # they take inputs and change no byte of a shard
CHAT_FACTS = ("chat_template", "chat_tokens", "chat_versions")
# Options with a default that every plan.json has. Others stand there only where they are used, so that an
# older shardprep reads what it can.
ALWAYS_WRITTEN = (
    "text_field", "text_template", "id_field", "source_field", "fix_text", "normalize", "min_chars",
    "max_chars", "limit", "text_versions",
)  # fmt: skip

CHOICES: dict[str, tuple[str, ...]] = {
    "record": get_args(Record),
    "doc": get_args(Doc),
    "pack": get_args(Pack),
    "token_format": get_args(TokenFormat),
    "engine": get_args(EngineName),
    "normalize": get_args(Normalize),
}
_TEXTS_OR_NONE = ("text_template", "id_field", "source_field", "normalize", "also")
_LIMITS = ("min_chars", "max_chars", "limit", "zstd_long")
_NOT_OF_CHAT = (
    "text_field", "text_template", "fix_text", "normalize", "min_chars", "max_chars", "append_eos"
)  # fmt: skip


def _known_encoding(name: str) -> str:
    """The codec's own name. Raises UsageError where lines cannot be told apart as bytes."""
    try:
        known = codecs.lookup(name)
        ascii_bytes = bytes(range(128))
        if known.name.startswith(("utf-16", "utf-32")):
            return known.name
        disguised = ("iso2022", "hz", "utf-7", "idna", "unicode-escape", "raw-unicode-escape")
        if not known.name.startswith(disguised) and ascii_bytes.decode(known.name) == ascii_bytes.decode(
            "ascii"
        ):
            return known.name
    except (LookupError, ValueError, TypeError):  # a NUL in the name is a ValueError, too
        raise UsageError(f"--encoding {name!r} is no text encoding of Python; try utf-8 or cp949") from None
    raise UsageError(
        f"--encoding {name} is neither a superset of ASCII nor UTF-16/32, so its line ends cannot be "
        "found; convert the files first: iconv -f ... -t utf-8"
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Each field is a flag of ``--shard_id N`` and of ``run``."""

    input_dir: Path | None = field(
        default=None, metadata={"help": "folder of the raw input files, where it is no longer the plan's"}
    )
    engine: EngineName = field(
        default="auto", metadata={"help": "what encodes; the ids never depend on it (default auto)"}
    )
    max_bad_fraction: float | None = field(
        default=None, metadata={"help": "share of documents left out as bad above which a shard fails (65)"}
    )
    batch_size: int | None = field(
        default=None, metadata={"help": "most documents encoded at once (default DATASET_BATCH_SIZE, or any)"}
    )
    writer_batch_size: int | None = field(
        default=None,
        metadata={"help": "most documents laid out at once (default DATASET_WRITER_BATCH_SIZE, or any)"},
    )
    memory_gb: float | None = field(
        default=None, metadata={"help": "memory of a process to stay below (default: the cgroup's limit)"}
    )

    def __post_init__(self) -> None:
        for name in ("batch_size", "writer_batch_size", "memory_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"--{name} is {value}, expected more than 0, and a number")

    @property
    def batch_bytes(self) -> int:
        """Bytes of raw text in a batch: resources.BATCH_BYTES, fewer where memory is short."""
        return batch_bytes_within(self.memory_gb)

    @property
    def most_batches(self) -> int:
        """Batches that may be laid out at once, fewer where memory is short."""
        return most_batches_within(self.memory_gb)


def environment_number(environ: Mapping[str, str], name: str) -> int | None:
    """A positive whole number of the environment, None where it is not set. Raises UsageError."""
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{name} is {text!r} in the environment, expected a whole number of 1 or more")
    return int(text)
