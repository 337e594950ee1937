"""What files are that no input format reads, by suffix and first bytes, and what to do with them instead.

``--also`` takes a file as plain text. So it is advised for text alone: of a zip archive it would make
documents of headers and compressed bytes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardprep.errors import quoted
from shardprep.format.inputs import COMPRESSION_SUFFIXES, known_input_kind

_MAX_OPENED = 8  # files of one reason: opening one is a round trip on a network file system
_MAX_KINDS = 3  # of files that one line explains


class _Kind(NamedTuple):
    """A kind of files. In ``todo`` {file} is the path of an example, quoted, and {new} without its suffix."""

    is_a: str
    suffixes: str
    todo: str
    magics: tuple[bytes, ...] = ()


_AS_TABLE = "convert it to Parquet with pandas, or type: duckdb -c {sql}"
_NO_TEXT = "it has no text to train on; move it away"
_WRITE_TEXTS = "write its texts as .jsonl or .parquet first"
_KINDS = (
    _Kind("a table", ".psv", _AS_TABLE),
    _Kind("a spreadsheet", ".xlsx .xls .xlsm .ods", "convert it to Parquet with pandas.read_excel"),
    _Kind(
        "an office document",
        ".docx .doc .odt .rtf .pptx .ppt .hwp .hwpx",
        "extract its text: pandoc -t plain {file} -o {new}.txt",
    ),
    _Kind("an e-book", ".epub .mobi .azw3 .fb2", "extract its text: pandoc -t plain {file} -o {new}.txt"),
    _Kind("a PDF document", ".pdf", "extract its text: pdftotext {file} {new}.txt", (b"%PDF-",)),
    _Kind("a PostScript document", ".ps .eps", "extract its text: ps2ascii {file} {new}.txt", (b"%!PS",)),
    _Kind(
        "a web archive",
        ".arc .wat",
        "if it has texts or pages, give its name the suffix .warc.gz",
        (b"WARC/",),
    ),
    _Kind(
        "a tar archive",
        ".tar .tgz .tbz2 .txz .tzst",
        "unpack it into a folder, and plan that: tar -xf {file} -C NEW",
    ),
    _Kind(
        "a 7z or rar archive",
        ".7z .rar",
        "unpack it into a folder, and plan that: 7z x {file} -oNEW",
        (b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07"),
    ),
    _Kind(
        "a zip archive",
        ".zip .jar .whl .egg",
        "unpack it into a folder, and plan that: unzip {file} -d NEW",
        (b"PK\x03\x04", b"PK\x05\x06"),
    ),
    _Kind(
        "an image",
        ".png .jpg .jpeg .gif .bmp .tif .tiff .webp .heic .ico .psd .avif .svg",
        _NO_TEXT,
        (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\x00", b"MM\x00*"),
    ),
    _Kind(
        "audio or video",
        ".mp3 .wav .flac .ogg .opus .m4a .aac .mp4 .mkv .avi .mov .webm .wmv",
        _NO_TEXT,
        (b"ID3", b"RIFF", b"fLaC", b"OggS", b"\x1aE\xdf\xa3"),
    ),
    _Kind("a database", ".db .sqlite .sqlite3 .duckdb .mdb .lmdb", _WRITE_TEXTS, (b"SQLite format 3\x00",)),
    _Kind(
        "a file of numpy, torch or pickle",
        ".npy .npz .pt .pth .ckpt .safetensors .pkl .pickle .joblib .gguf",
        _WRITE_TEXTS,
        (b"\x93NUMPY", b"\x80\x04\x95", b"\x80\x02}", b"GGUF"),
    ),
    _Kind(
        "a data set of another tool",
        ".bin .idx .mds .tfrecord .tfrecords .h5 .hdf5 .lance .avro .orc .feather2 .beton .recordio",
        _WRITE_TEXTS,
        (b"MMIDIDX", b"\x89HDF\r\n", b"Obj\x01", b"ORC"),
    ),
    _Kind("a Parquet file with another name", "", "give its name the suffix .parquet", (b"PAR1",)),
    _Kind("an Arrow file with another name", "", "give its name the suffix .arrow", (b"ARROW1",)),
    _Kind(
        "compressed in a way that is not read",
        ".lz4 .br .lzma .snappy .sz .z .lzo .zlib",
        "decompress it",
        (b"\x04\x22\x4d\x18", b"\x1f\x9d"),
    ),
    _Kind(
        "compressed, and its name does not say so",
        "",
        "give its name a suffix such as .txt.gz",
        (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"),
    ),
    _Kind(
        "an unfinished file",
        ".tmp .part .partial .crdownload .download .aria2 .incomplete .lock .swp",
        "wait for the end of its download, or move it away",
    ),
    _Kind("a file that was converted", ".whole .before", "its text is taken from the new file"),
    _Kind("a program", ".so .dll .exe .dylib .o .a .class .pyc", _NO_TEXT, (b"\x7fELF", b"MZ\x90")),
    _Kind(
        "text in UTF-16",
        "",
        "convert it: iconv -f utf-16 -t utf-8 {file} -o {new}.txt",
        (b"\xff\xfe", b"\xfe\xff"),
    ),
)
# Files that Spark, Hadoop, Delta and pyarrow write beside their data. Most are empty.
_MARKER = re.compile(
    r"_(success|temporary|metadata|common_metadata|delta_log|delta_index|spark_metadata|logs|manifests?"
    r"|committed_.*|started_.*|symlink_format_manifest|change_data|crc|checkpoints?)",
    re.IGNORECASE,
)
_CONTROL = bytes([*range(0x09), *range(0x0E, 0x1B), *range(0x1C, 0x20)])  # that text does not have
_TAR_MAGIC_AT = 257
_MAGIC_BYTES = 512  # in which a binary file has control characters
_TEXT_MAGICS = (b"%PDF-", b"WARC/1.", b"\xff\xfe", b"\xfe\xff")  # of kinds that may have none


def advice_about(names: Sequence[str], input_dir: Path, beginning_of: Callable[[Path], bytes | None]) -> str:
    """Return what to do with files that are left out for their names, such as "; --also '*.md' takes ...".

    ``names``: relative to ``input_dir``. Up to eight files are opened, one of each suffix. ``beginning_of``
    returns the first bytes of a file, decompressed, or None if it cannot be read.
    """
    examples: dict[str, str] = {}  # suffix, or the name of a file without one -> the first file
    for name in names:
        if not _MARKER.fullmatch(name.rpartition("/")[2]):
            examples.setdefault(_pattern_of(name), name)
    advice_of_files: dict[str, None] = {}  # in order, each once
    for pattern, name in list(examples.items())[:_MAX_OPENED]:
        advice_of_files[_advice_about_file(name, pattern, input_dir, beginning_of)] = None
    return "".join(f"; {advice}" for advice in list(advice_of_files)[:_MAX_KINDS] if advice)


def _pattern_of(name: str) -> str:
    """Return the pattern of --also that takes files like this one: *.md, *.md.gz, or its name."""
    base = name.rpartition("/")[2]
    stem, dot, suffix = base.rpartition(".")
    if not stem or base.startswith("_"):
        return base
    if dot + suffix.lower() in COMPRESSION_SUFFIXES and "." in stem:
        return f"*.{stem.rpartition('.')[2]}.{suffix}"
    return f"*.{suffix}"


def _advice_about_file(
    name: str, pattern: str, input_dir: Path, beginning_of: Callable[[Path], bytes | None]
) -> str:
    path = input_dir / name
    if path.is_dir():
        return f"--also {_shown(pattern)} takes it, and --recursive its files"
    head = beginning_of(path)
    kind = _kind_of(path.name, head or b"")
    if kind is not None:
        stem = str(path.absolute()).removesuffix(pattern.removeprefix("*"))
        facts = {"file": quoted(path), "new": quoted(stem), "sql": _sql_of_table(path.absolute(), stem)}
        return f"{ascii_if_odd(name)} is {kind.is_a}: {kind.todo.format(**facts)}"
    if head is None:
        return f"{ascii_if_odd(name)} cannot be read"
    if not head:
        return f"{ascii_if_odd(name)} is empty"
    if _is_binary(head):
        return f"{ascii_if_odd(name)} is not text: {_WRITE_TEXTS}, or move it away"
    return f"--also {_shown(pattern)} takes such files, as plain text"


def _sql_of_table(path: Path, stem: str) -> str:
    """Return the SQL that writes a table as Parquet, quoted for a shell."""
    sql = f"COPY (FROM read_csv('{path}')) TO '{stem}.parquet'"
    return f'"{sql}"' if not re.search(r"[\"$`\\!]", sql) else shlex.quote(sql)


def _kind_of(name: str, head: bytes) -> _Kind | None:
    """Return the kind of a file, or None for text and for binary files that are not known."""
    stem, dot, suffix = name.lower().rpartition(".")
    if not dot:
        stem = suffix
        suffix = ""
    is_compressed = f".{suffix}" in COMPRESSION_SUFFIXES
    if is_compressed:  # the name in front says what it is, as in .csv.gz and .tar.zst
        suffix = stem.rpartition(".")[2]
    for kind in _KINDS:
        if suffix and f".{suffix}" in kind.suffixes.split(" "):
            return kind
    known = known_input_kind(stem) if is_compressed else None
    if known is not None and not known.format.can_be_compressed:
        return _Kind(f"a compressed .{suffix}", "", "decompress it; it is compressed inside")
    if head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        return next(kind for kind in _KINDS if ".tar" in kind.suffixes)
    for kind in _KINDS:
        if head.startswith(kind.magics):
            return kind
    return None


def content_that_is_no_text(path: Path, head: bytes) -> tuple[str, str] | None:
    """Return what a file with a suffix of texts is instead, and what to do with it. None for text."""
    if not (_is_binary(head[:_MAGIC_BYTES]) or head.startswith(_TEXT_MAGICS)):
        return None
    kind = _kind_of("", head)
    if kind is None:
        return None
    stem = quoted(path.with_suffix("").absolute())
    facts = {"file": quoted(path), "new": stem, "sql": ""}
    return kind.is_a, kind.todo.format(**facts)


def _is_binary(data: bytes) -> bool:
    return len(data.translate(None, _CONTROL)) < len(data)


def _shown(pattern: str) -> str:
    return f"'{pattern}'" if pattern.isprintable() and "'" not in pattern else "PATTERN"


def ascii_if_odd(name: str) -> str:
    """Return a name, or its ASCII form if it has characters that cannot be printed."""
    return name if name.isprintable() else ascii(name)
