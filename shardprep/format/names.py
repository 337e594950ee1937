"""Names and limits of the files of a data set.

Shard ids are written as ``sbatch --array`` and ``--shards`` take them: ``0-2,5,7-9``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shardprep.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

MAX_SHARDS = 99_999  # shard names have five digits
MAX_INDEX_BYTES = 64 << 20  # an index.json of 99,999 shards has 8 MB
MAX_SAMPLES = 2**40  # of a shard
MAX_SEQ_LEN = 2**27
# Of documents held out for validation.
MIN_FRACTION = 1e-6
MAX_FRACTION = 0.5
BLOCK_BYTES = 512  # of a tar
DIGEST_BYTES = 16  # of a document's digest in DATA/digests
TAR_END = bytes(2 * BLOCK_BYTES)  # the two zero blocks that close a tar
MAX_TOKENIZER_BYTES = 256 << 20  # the largest known one has 40 MB
MAX_MEMBER_BYTES = 2**32 - 1  # sizes in the idx are uint32; ustar allows 8 GiB
PACKED_MEMBER_BYTES = 512 * 1024  # rows are grouped into members of about this size


PLAN_NAME = "plan.json"
INDEX_NAME = "index.json"
TOKENIZER_DIR = "tokenizer"
TOKENIZER_FILE = "tokenizer.json"
FAST_TOKENIZER_FILE = "fast_tokenizer.json"  # a copy without merges that no text can use
CHAT_TEMPLATES_DIR = "additional_chat_templates"  # in a tokenizer's folder; a name of transformers
QUARANTINE_DIR = "quarantine"
IDS_DIR = "ids"
DIGESTS_DIR = "digests"
EXCLUDED_NAME = "excluded.keys"  # keys of the names of documents left out by --exclude
EXCLUDED_LIST_NAME = "excluded.txt"  # these names, only for people
BLANKED_DIR = "blanked"  # lists of blanked documents, in a data set made by ``blank``
TRANSFORM_DIR = "transform"  # a copy of the --transform file, only for reading; it is never run
ROW_IDS_FIELD = "token_ids.npy"
DOC_STARTS_FIELD = "doc_starts.npy"
LOSS_MASK_FIELD = "loss_mask.npy"  # of chat rows: 1 for tokens of the assistant
ROW_TOKENS_FIELD = "row_tokens.npy"
TEXT_FIELD = "text.txt"


def shard_name(shard_id: int) -> str:
    """Return ``shard-00017``, the stem of all files of a shard."""
    return f"shard-{shard_id:05d}"


def tar_name(shard_id: int) -> str:
    """Return the name of a shard's tar in the folder of its data set."""
    return f"shard-{shard_id:05d}.tar"


def idx_name(shard_id: int) -> str:
    return f"shard-{shard_id:05d}.idx"


def manifest_name(shard_id: int) -> str:
    return f"shard-{shard_id:05d}.json"


def quarantine_name(shard_id: int) -> str:
    return f"{QUARANTINE_DIR}/shard-{shard_id:05d}.jsonl"


def ids_name(shard_id: int) -> str:
    return f"{IDS_DIR}/shard-{shard_id:05d}.jsonl"


def digests_name(shard_id: int) -> str:
    return f"{DIGESTS_DIR}/shard-{shard_id:05d}.digests"


def blanked_name(shard_id: int) -> str:
    return f"{BLANKED_DIR}/shard-{shard_id:05d}.json"


# Names of the files whose FileStamps are in the manifest, by their keys there.
STAMPED_NAMES: Mapping[str, Callable[[int], str]] = {
    "tar": tar_name,
    "idx": idx_name,
    "quarantine": quarantine_name,
    "ids": ids_name,
    "digests": digests_name,
}


def is_chosen(reason: str) -> bool:
    """Return whether a document is left out because the user chose so, not because it is unusable."""
    return reason in ("excluded", "transform", "not_learnt") or reason.startswith("transform: ")


def source_of_path(path: str) -> str:
    """Return the source of an input: the first folder of its path in the input folder, or "."."""
    return path.partition("/")[0] if "/" in path else "."


def document_key(shard_id: int, line: int) -> str:
    """Return the key of a document, from its shard and its line or row in the shard's input, from 0."""
    return f"sample_{shard_id}_{line:08d}"


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of a version 1.0 ``.npy`` file, as ``numpy.save`` writes it (128 bytes)."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + f"{text:<117}\n".encode()


_ID_RANGE = re.compile(r"\s*([0-9]{1,7})(?:-([0-9]{1,7}))?\s*")


def id_ranges(ids: Iterable[int]) -> str:
    """Return ``0-2,5`` for [0, 1, 2, 5] in any order, and "" for no ids."""
    parts: list[list[int]] = []
    for number in sorted(ids):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def ids_of_ranges(text: str, *, end: int = MAX_SHARDS) -> list[int]:
    """Return [0, 1, 2, 5] for ``0-2,5``, in the order given, each below ``end``. Raises ValueError."""
    ids: list[int] = []
    for part in text.split(",", MAX_SHARDS):
        match = _ID_RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, end)
        # Checked before the list grows: ``0-99998,0-99998,...`` in a file must not fill the memory.
        if not first <= last < end or len(ids) + last - first > MAX_SHARDS:
            raise ValueError(f"{text[:40]!r} is not a list of shard ids such as 0-2,5")
        ids += range(first, last + 1)
    return ids


def chosen_shards(num_shards: int, text: str | None) -> set[int] | None:
    """Return the ids given to --shards, or None for all shards. Raises UsageError."""
    if text is None:
        return None
    try:
        return set(ids_of_ranges(text, end=num_shards))
    except ValueError:
        expected = f"ids from 0 to {num_shards - 1}, separated by commas"
        raise UsageError.of_value("--shards", text[:60], expected) from None
