"""What a user can choose: one frozen dataclass whose fields are the command's flags.

Options of one run of a worker, which change no byte of a shard, and the limits they stand under.
"""

from __future__ import annotations

import codecs
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from shardprep.errors import UsageError
from shardprep.format.names import Record, TokenFormat

Doc = Literal["line", "file"]
Pack = Literal["concat", "best_fit"]
EngineName = Literal["auto", "fastokens", "tokenizers"]


@dataclass(frozen=True, kw_only=True)
class PrepConfig:
    """Options of a data set. Each field is a flag; BYTES_OPTIONS decide the shards' bytes."""

    input_dir: Path = field(default=Path("/data/raw"), metadata={"help": "folder of the raw .txt files"})
    output_dir: Path = field(default=Path("/data/processed"), metadata={"help": "folder of the data set"})
    model_id: str = field(
        default="meta-llama/Meta-Llama-3-8B", metadata={"help": "tokenizer: a folder or a name on the hub"}
    )
    recursive: bool = field(default=False, metadata={"help": "take the .txt files of subfolders, too"})
    doc: Doc = field(default="line", metadata={"help": "what a document is: a line, or a whole file"})
    encoding: str = field(
        default="utf-8", metadata={"help": "of the input; utf-8-sig drops a leading byte order mark"}
    )
    record: Record = field(
        default="documents", metadata={"help": "a sample a document, or documents packed into rows"}
    )
    seq_len: int | None = field(default=None, metadata={"help": "tokens a packed row (default 8192)"})
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
    max_bad_fraction: float = field(
        default=0.01, metadata={"help": "share of undecodable documents above which a shard fails (65)"}
    )
    engine: EngineName = field(default="auto", metadata={"help": "what encodes; the ids never depend on it"})
    hash_inputs: bool = field(
        default=False, metadata={"help": "hash the whole input when planning; workers compare what they read"}
    )

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"--{name} is {value!r}, expected one of {', '.join(choices)}")
        if not 0 <= self.max_bad_fraction <= 1:
            raise UsageError(f"--max_bad_fraction is {self.max_bad_fraction}, expected 0 to 1")
        packed = self.record == "packed"
        if not packed and self.seq_len is not None:
            raise UsageError("--seq_len is for packed rows; add --record packed, or leave it out")
        if not packed and self.pack != "concat":
            raise UsageError(f"--pack {self.pack} is for packed rows; add --record packed, or leave it out")
        if packed and self.keep_text:
            raise UsageError("--keep_text is for documents; packed rows hold no text")
        seq_len = 0 if not packed else 8192 if self.seq_len is None else self.seq_len
        if packed and not 1 <= seq_len <= 2**27:
            raise UsageError(f"--seq_len is {seq_len}, expected 1 to {2**27}")
        resolved = {
            "seq_len": seq_len,
            "token_format": "npy" if packed else self.token_format,
            "keep_text": not packed if self.keep_text is None else self.keep_text,
            "append_eos": packed if self.append_eos is None else self.append_eos,
            "encoding": _known_encoding(self.encoding),
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    def bytes_options(self) -> dict[str, Any]:
        """The options that decide the shards' bytes, as plan.json keeps them."""
        return {name: getattr(self, name) for name in BYTES_OPTIONS}


CHOICES: dict[str, tuple[str, ...]] = {
    "record": get_args(Record),
    "doc": get_args(Doc),
    "pack": get_args(Pack),
    "token_format": get_args(TokenFormat),
    "engine": get_args(EngineName),
}
BYTES_OPTIONS = (
    "recursive",
    "doc",
    "encoding",
    "record",
    "seq_len",
    "pack",
    "token_format",
    "keep_text",
    "append_eos",
    "allow_special_tokens",
)


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


BATCH_BYTES = 512 << 10  # of raw text; 128 KiB to 2 MiB take the same time (benchmarks/preprocess.py)
_SMALLEST_BATCH_BYTES = 64 << 10
PROCESS_BYTES = 300 << 20  # a worker of Llama 3's vocabulary before its first document
_BYTES_A_BATCH_BYTE = (
    200  # what a byte of a batch takes on its way: text, ids, tar blocks, three batches at once
)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Each field is a flag of ``--shard_id N`` and of ``run``."""

    input_dir: Path | None = field(
        default=None, metadata={"help": "folder of the raw .txt files, where it is no longer the plan's"}
    )
    engine: EngineName = field(
        default="auto", metadata={"help": "what encodes; the ids never depend on it (default auto)"}
    )
    max_bad_fraction: float | None = field(
        default=None, metadata={"help": "share of undecodable documents above which a shard fails (65)"}
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
        """Raw text taken at once: BATCH_BYTES, less where memory is short."""
        if self.memory_gb is None:
            return BATCH_BYTES
        spare = int(min(self.memory_gb, 2**20) * 2**30) - PROCESS_BYTES
        return min(BATCH_BYTES, max(_SMALLEST_BATCH_BYTES, spare // _BYTES_A_BATCH_BYTE))


def memory_note(memory_gb: float, num_processes: int = 1) -> str | None:
    """What to say where a worker will need more memory than it may have, else None."""
    least = (PROCESS_BYTES + _SMALLEST_BATCH_BYTES * _BYTES_A_BATCH_BYTE) / 2**30
    if memory_gb >= least:
        return None
    each = "" if num_processes == 1 else f" for each of {num_processes} processes"
    return (
        f"a worker needs about {least:.2f} GB with a vocabulary as large as Llama 3's, and there are "
        f"{memory_gb:.2f} GB{each}; it may be killed: give it more (--memory_gb, sbatch --mem), or "
        "take fewer processes (--num_proc)"
    )


def environment_number(environ: Mapping[str, str], name: str) -> int | None:
    """A positive whole number of the environment, None where it is not set. Raises UsageError."""
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{name} is {text!r} in the environment, expected a whole number of 1 or more")
    return int(text)


def memory_limit_gb(environ: Mapping[str, str], root: Path = Path("/")) -> float:
    """The memory that this job may use: the least of Slurm's, the cgroups' and the machine's, in GiB."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if (megabytes := environ.get("SLURM_MEM_PER_NODE", "")).isdigit() and int(megabytes):
        limits.append(int(megabytes) << 20)
    for path in _cgroup_limit_files(root):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits) / 2**30


def _cgroup_limit_files(root: Path) -> list[Path]:
    """Where the limits of this process's cgroup and of those above it are, in either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, limit = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / name.lstrip("/")
        files += [parent / limit for parent in (folder, *folder.parents) if parent.is_relative_to(base)]
    return files
