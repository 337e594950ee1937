"""What all files of the contract share: names, limits, input formats, JSON; last the spec of a data set.

Shard ids are written as ``sbatch --array`` and ``--shards`` take them: ``0-2,5,7-9``.

Each JSON file has a ``format``, a ``version`` and a ``content_sha256``, the hash of its other values: a bit
that flips on a disk is refused, and so is a hand that edits what is frozen. The fields of a dataclass say the
type and the bounds of each value; msgspec checks them. An error names the file, the place in it, what was
found and what was expected.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from shardprep.errors import BrokenShard, MissingShard, UnknownVersion, UsageError, quoted
from shardprep.files import Digest, read_regular

if TYPE_CHECKING:
    import numpy as np

MAX_SHARDS = 99_999  # shard names carry five digits
MAX_SAMPLES = 2**40  # of a shard
MAX_SEQ_LEN = 2**27
LEAST_FRACTION, MOST_FRACTION = 1e-6, 0.5  # of the documents, for validation
BLOCK_BYTES = 512  # a tar is a sequence of such blocks
DIGEST_BYTES = 16  # of a document's hash in DATA/digests
TAR_END = bytes(2 * BLOCK_BYTES)  # the two zero blocks that close a tar
MAX_TOKENIZER_BYTES = 256 << 20  # the largest known have 40 MB
MAX_MEMBER_BYTES = 2**32 - 1  # the idx keeps sizes as uint32; ustar itself ends at 8 GiB
PACKED_MEMBER_BYTES = 512 * 1024  # rows are grouped into members of about this size

Record = Literal["documents", "packed", "chat"]
TokenFormat = Literal["json", "npy"]

PLAN_NAME = "plan.json"
INDEX_NAME = "index.json"
TOKENIZER_DIR = "tokenizer"
TOKENIZER_FILE = "tokenizer.json"
FAST_TOKENIZER_FILE = "fast_tokenizer.json"  # the same, without merges that no text needs
CHAT_TEMPLATES_DIR = "additional_chat_templates"  # in a tokenizer's folder, as transformers names it
QUARANTINE_DIR = "quarantine"
IDS_DIR = "ids"
DIGESTS_DIR = "digests"
EXCLUDED_NAME = "excluded.keys"  # names of documents that a plan leaves out, see --exclude
BLANKED_DIR = "blanked"  # of a data set that blank made: which documents of a shard are blanked
TRANSFORM_DIR = "transform"  # a copy of what --transform names, for people: it never runs
ROW_IDS_FIELD = "token_ids.npy"
DOC_STARTS_FIELD = "doc_starts.npy"
LOSS_MASK_FIELD = "loss_mask.npy"  # of chat rows: 1 where the assistant wrote the token
ROW_TOKENS_FIELD = "row_tokens.npy"
TEXT_FIELD = "text.txt"


def shard_name(shard_id: int) -> str:
    """Return ``shard-00017``, the stem that a shard's tar, idx, manifest and quarantine share."""
    return f"shard-{shard_id:05d}"


def _path_of(kind: str) -> Callable[[Path, int], Path]:
    return lambda folder, shard_id: folder / kind.format(shard_name(shard_id))


# Each gives the path of such a file, by the data set's folder and the shard's id: of the files that a
# manifest vouches for, by their names there, and of others.
VOUCHED_PATHS = {
    "tar": _path_of("{}.tar"),
    "idx": _path_of("{}.idx"),
    "quarantine": _path_of(f"{QUARANTINE_DIR}/{{}}.jsonl"),
    "ids": _path_of(f"{IDS_DIR}/{{}}.jsonl"),
    "digests": _path_of(f"{DIGESTS_DIR}/{{}}.digests"),
}
tar_path, idx_path, quarantine_path, ids_path, digests_path = VOUCHED_PATHS.values()
manifest_path, blanked_path = _path_of("{}.json"), _path_of(f"{BLANKED_DIR}/{{}}.json")


def is_chosen(reason: str) -> bool:
    """Return whether a document is left out by the user's choice, and not because it cannot be used."""
    return reason in ("excluded", "transform") or reason.startswith("transform: ")


def source_of_path(path: str) -> str:
    """Return the source of an input by its path in the input folder: its first subfolder, "." without one."""
    folder, slash, _ = path.partition("/")
    return folder if slash else "."


def document_key(shard_id: int, line: int) -> str:
    """Return the key of a document: its shard, and its line counted from 0 in that shard's input."""
    return f"sample_{shard_id}_{line:08d}"


def rerun_command(shard_id: int, folder: Path) -> str:
    """Return what a user types to make one shard again."""
    return f"shardprep --shard_id {shard_id} --output_dir {quoted(folder)}"


def remake_command(shard_id: int, folder: Path) -> str:
    """Return what a user types where a shard is wrong that counts as done, by its manifest."""
    return f"rm {quoted(manifest_path(folder, shard_id))} && {rerun_command(shard_id, folder)}"


def missing_file(path: Path, shard_id: int, folder: Path) -> MissingShard:
    """Build the error for a missing file of a shard."""
    # A shard counts as done without its side files, which are in subfolders.
    command = rerun_command if path.parent == folder else remake_command
    return MissingShard(path=path, found="missing", remedy=command(shard_id, folder))


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of a version 1.0 ``.npy`` file, as ``numpy.save`` writes it (128 bytes)."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + f"{text:<117}\n".encode()


_PART = re.compile(r"\s*([0-9]{1,7})(?:-([0-9]{1,7}))?\s*")


def id_ranges(ids: Iterable[int]) -> str:
    """Return ``0-2,5`` for [0, 1, 2, 5], in ascending order, and nothing for none."""
    parts: list[list[int]] = []
    for number in sorted(ids):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def ids_of_ranges(text: str, *, end: int = MAX_SHARDS) -> list[int]:
    """Return [0, 1, 2, 5] for ``0-2,5``, in the order given, each below ``end``. Raises ValueError."""
    ids: list[int] = []
    for part in text.split(",", MAX_SHARDS):
        match = _PART.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, end)
        # Checked before the list grows: ``0-99998,0-99998,...`` in a file must not fill the memory.
        if not first <= last < end or len(ids) + last - first > MAX_SHARDS:
            raise ValueError(f"{text[:40]!r} is not a list of shard ids such as 0-2,5")
        ids += range(first, last + 1)
    return ids


def chosen_shards(num_shards: int, text: str | None) -> set[int] | None:
    """Return the shards of --shards, or None for all. Raises UsageError."""
    if text is None:
        return None
    try:
        return set(ids_of_ranges(text, end=num_shards))
    except ValueError:
        expected = f"ids of 0 to {num_shards - 1}, such as {num_shards - 1}"
        raise UsageError.of_value("--shards", text[:60], expected) from None


# docs/architecture.md ("An input format") says what else to write for a new line of INPUT_FORMATS.


class InputFormat(NamedTuple):
    """One format of input files. docs/inputs.md says what its documents are, and where a shard may begin."""

    suffixes: tuple[str, ...]  # in lower case; the first is the usual one
    reader: str  # module and class in preprocess/read, "lines:JsonLines"
    unit: Literal["byte", "row"] = "byte"  # of a place: of the file (decompressed: of its text), or rows
    can_be_compressed: bool = False
    has_fields: bool = True  # records with named fields; else plain text
    library: str = ""  # that the reader imports, of the extra [columns]


INPUT_FORMATS = (
    InputFormat((".txt", ".text"), "lines:TextLines", can_be_compressed=True, has_fields=False),
    InputFormat((".jsonl", ".ndjson", ".jsonlines"), "lines:JsonLines", can_be_compressed=True),
    InputFormat((".json",), "lines:JsonFile", can_be_compressed=True),  # one object per line
    InputFormat((".parquet", ".pq"), "tables:Parquet", unit="row", library="pyarrow"),
    InputFormat((".arrow", ".ipc", ".feather"), "tables:Arrow", unit="row", library="pyarrow"),
)
PLAIN_TEXT = INPUT_FORMATS[0]  # also what `--also` takes with another suffix
# Each suffix of a compression, and the usual one of the same meaning.
COMPRESSION_SUFFIXES = {
    ".gz": ".gz", ".gzip": ".gz", ".zst": ".zst", ".zstd": ".zst", ".xz": ".xz", ".bz2": ".bz2"
}  # fmt: skip
_BY_SUFFIX = {suffix: each for each in INPUT_FORMATS for suffix in each.suffixes}


class InputKind(NamedTuple):
    """What an input's name says of it."""

    format: InputFormat
    compression: str  # its usual suffix; "" for none

    @property
    def unit(self) -> str:
        """Return what the offset of a document counts."""
        return "byte of the text" if self.compression and self.format.unit == "byte" else self.format.unit

    @property
    def is_in_bytes(self) -> bool:
        """Return whether offsets are bytes of the file itself, as the cuts of the plan are."""
        return self.unit == "byte"


def known_input_kind(path: str) -> InputKind | None:
    """Return the kind of a file by its name, upper or lower case, or None for a suffix that is not known."""
    stem, dot, suffix = path.rpartition("/")[2].lower().rpartition(".")
    compression = COMPRESSION_SUFFIXES.get(dot + suffix, "")
    if compression:
        _, dot, suffix = stem.rpartition(".")
    found = _BY_SUFFIX.get(dot + suffix)
    if found is None or (compression and not found.can_be_compressed):
        return None
    return InputKind(found, compression)


def input_kind(path: str) -> InputKind:
    """Return the kind of a file that is an input: with an unknown suffix (``--also``), plain text."""
    compression = COMPRESSION_SUFFIXES.get("." + path.lower().rpartition(".")[2], "")
    return known_input_kind(path) or InputKind(PLAIN_TEXT, compression)


def place_text(path: str, offset: int) -> str:
    """Return ``ko_1.txt byte 4512``, ``a.parquet row 17``."""
    return f"{path} {input_kind(path).unit} {offset}"


def name_of_input(names: Sequence[str], number: int) -> str:
    """Return the name of an input by its number, which an idx or a side file may have got wrong."""
    return names[number] if 0 <= number < len(names) else f"input {number}, which the plan does not have,"


def known_suffixes() -> str:
    """Return the suffixes of all formats, for messages."""
    can_be = [each.suffixes[0] for each in INPUT_FORMATS if each.can_be_compressed]
    cannot_be = [each.suffixes[0] for each in INPUT_FORMATS if not each.can_be_compressed]
    compressions = dict.fromkeys(COMPRESSION_SUFFIXES.values())
    return "; ".join([f"{', '.join(can_be)}, each also with {', '.join(compressions)}", *cannot_be])


# The decoder, truncation and padding change no id of an encoded document.
_DECISIVE = ("added_tokens", "normalizer", "pre_tokenizer", "model", "post_processor")


def token_bytes(vocab_size: int) -> int:
    """Return the bytes of a binary token id: 2 where all ids and ``blank_id`` fit into uint16, else 4."""
    return 2 if vocab_size < 1 << 16 else 4


# In place of each id of a blanked document: no vocabulary has it, and no embedding, however it is padded. So
# a reader that does not know of blanked documents fails, and never trains on them.
BLANK = 2**31 - 1


def blank_id(vocab_size: int) -> int:
    """Return BLANK as binary ids say it. Those of two bytes have their largest value for it."""
    return BLANK if token_bytes(vocab_size) == 4 else 2**16 - 1


def fingerprint_of(data: dict[str, Any]) -> str:
    """Return the sha256, in hex, of what decides ids in a parsed ``tokenizer.json``, whatever its order."""
    kept = {name: data.get(name) for name in _DECISIVE}
    model = kept["model"] or {}
    merges, vocab = model.get("merges"), model.get("vocab")
    if merges:
        pairs = [m.split(" ") if isinstance(m, str) else m for m in merges]
        kept["model"] = model = {**model, "merges": pairs}
    if isinstance(vocab, dict):  # json would sort pairs, which takes three times as long
        kept["model"] = {**model, "vocab": {token: vocab[token] for token in sorted(vocab)}}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


T = TypeVar("T")

FORMAT_VERSION = 3  # of all that this package describes
CONTENT_HASH = "content_sha256"
RUN = "run"  # what varies between equal files; outside of the content's hash, with one of its own
RUN_HASH = "run_sha256"
MOST = 2**63 - 1  # the largest number that the columns of an index can hold

Count = Annotated[int, Meta(ge=0, le=MOST)]
Seconds = Annotated[float, Meta(ge=0, le=MOST)]
Text = Annotated[str, Meta(pattern=r"\A[^\0]*\Z")]  # which a path and a message can hold

_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text",
          "array": "a list", "object": "an object"}  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")  # of the place in an error of msgspec, such as $.shards[3]


def content_sha256(data: Mapping[str, Any]) -> str:
    """Return the sha256, in hex, of an object's values, without its hash and ``run``."""
    kept = {name: value for name, value in data.items() if name not in {CONTENT_HASH, RUN}}
    return hashlib.sha256(_canonical(kept).encode("ascii")).hexdigest()


def with_content_hash(
    file_format: str, content: Mapping[str, Any], run: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the whole object of a file: format, version, ``content`` and its hash, ``run`` and its hash."""
    data = {"format": file_format, "version": FORMAT_VERSION, **content}
    data[CONTENT_HASH] = content_sha256(data)
    return data if run is None else {**data, RUN: {**run, RUN_HASH: content_sha256(run)}}


def read_file(path: Path, file_format: str, kind: type[T], *, max_bytes: int) -> T:
    return as_type(path, checked_object(path, read_regular(path, max_bytes=max_bytes), file_format), kind)


def checked_object(path: Path, raw: bytes | bytearray, file_format: str) -> dict[str, Any]:
    """Return what a file holds, once format, version and hashes are right, without these."""
    try:
        data: Any = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # a ValueError: it is no UTF-8
        raise BrokenShard(path=path, found=str(error), expected="JSON") from None
    found = data.get("format") if isinstance(data, dict) else type(data).__name__
    if found != file_format:
        raise BrokenShard(path=path, found=f"format {_shown(found)}", expected=file_format)
    version = data.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise unknown_version(path, version)
    _check_hash(path, CONTENT_HASH, data)
    if isinstance(data.get(RUN), dict):
        _check_hash(path, RUN_HASH, data[RUN])
    fields: dict[str, Any] = data
    del fields["format"], fields["version"]
    return fields


def _check_hash(path: Path, name: str, data: dict[str, Any]) -> None:
    found, expected = data.pop(name, None), content_sha256(data)
    if found != expected:
        raise BrokenShard(path=path, found=f"altered: {name} {_shown(found)}", expected=expected[:12])


# msgspec looks at a type when it first meets it, and two threads that do so at once end the process: 12 of
# msgspec 0.20 by SIGSEGV, in 10 of 60 tries.
_one_at_a_time = threading.Lock()


@contextmanager
def type_errors_named(path: Path, data: Any = ...) -> Iterator[None]:
    """Turn what msgspec says of values of JSON into a BrokenShard that has the place and the value."""
    try:
        with _one_at_a_time:
            yield
    except (UnicodeEncodeError, UnicodeDecodeError) as error:  # half a pair of surrogates, as JSON may say it
        raise BrokenShard(path=path, found=_shown(error.object), expected="text in UTF-8") from None
    except msgspec.DecodeError as error:
        if not isinstance(error, msgspec.ValidationError):
            raise BrokenShard(path=path, found=str(error), expected="JSON") from None
        what, _, place = str(error).removesuffix("`").partition(" - at `$")
        found = data
        for name, number in _STEP.findall(place):
            # The place of a value below a key that any file may choose ends in [...].
            inside = found.get(name, ...) if isinstance(found, dict) else ...
            found = found[int(number)] if number and isinstance(found, (list, tuple)) else inside
        expected = re.sub(r"Expected |, got `\w+`", "", what)
        for name, words in _WORDS.items():
            expected = re.sub(rf"`{name}( \| null)?`", rf"{words}\1", expected)
        raise wrong_value(path, place.removeprefix("."), found, expected) from None


def as_type(path: Path, data: Any, kind: type[T]) -> T:
    """Return values of JSON as a dataclass, or another type, whose bounds they meet."""
    with type_errors_named(path, data):
        return msgspec.convert(data, kind)


def wrong_value(path: Path, place: str, found: object, expected: str) -> BrokenShard:
    shown = "a value" if found is ... else _shown(found)
    return BrokenShard(path=path, found=f"{place or 'all of it'} is {shown}", expected=expected)


def unknown_version(path: Path, found: object) -> UnknownVersion:
    """Return the error of a file of another version, with what is to be done about it."""
    anew = "shardprep plan --input_dir RAW --output_dir NEW --model_id MODEL --num_shards N"
    expected = f"{FORMAT_VERSION}; install the shardprep that wrote it, or plan anew into a new folder"
    remedy = anew if type(found) is int and found < FORMAT_VERSION else None
    version = f"format version {_shown(found)}"
    return UnknownVersion(path=path, found=version, expected=expected, remedy=remedy)


def _shown(value: object) -> str:
    """Return a value as an error repeats it: short, and printable whatever it is."""
    try:
        text = ascii(value) if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, say
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."


def load_json(raw: bytes | bytearray) -> Any:
    """Parse JSON in UTF-8. Raises ValueError, too deep JSON included."""
    try:
        return json.loads(raw.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def is_text(value: object) -> bool:
    """Return whether a value is a str that can be written: it holds no half of a surrogate pair."""
    return isinstance(value, str) and _SURROGATE.search(value) is None


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """What shards remember of the tokenizer that made them."""

    model_id: Text
    fingerprint: Digest  # see fingerprint_of
    vocab_size: Annotated[int, Meta(ge=1, le=2**32 - 1)]  # added tokens included
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    def __post_init__(self) -> None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if not 0 <= (getattr(self, name) or 0) < self.vocab_size:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 to {self.vocab_size - 1}")


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Every manifest carries it whole."""

    plan_id: Digest
    num_shards: Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
    record: Record
    token_format: TokenFormat
    seq_len: Annotated[int, Meta(ge=0, le=MAX_SEQ_LEN)]  # tokens per packed row; 0 unless packed
    append_eos: bool
    tokenizer: TokenizerSpec
    validation_fraction: Annotated[float, Meta(ge=0, le=MOST_FRACTION)] = 0.0  # see documents.py

    def __post_init__(self) -> None:
        if self.has_rows != (self.seq_len > 0):
            expected = f"1 to {MAX_SEQ_LEN}" if self.has_rows else "0"
            raise ValueError(f"seq_len is {self.seq_len}, expected {expected} for {self.record}")
        if self.has_rows and self.token_format != "npy":
            raise ValueError(f"token_format is {self.token_format}, expected npy for {self.record}")

    @property
    def has_rows(self) -> bool:
        """Return whether a sample is a row of ``seq_len`` tokens, and no document."""
        return self.record != "documents"

    @cached_property
    def kind(self) -> str:
        """Return how a sample's ids are stored: one of IDX_DTYPES."""
        return self.record if self.has_rows else self.token_format

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.tokenizer.vocab_size)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of binary ids: uint16 or uint32, little-endian."""
        import numpy as np

        return np.dtype(f"<u{self.token_bytes}")
