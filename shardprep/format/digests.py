"""digests/shard-N.digests: which document each one is, by its content, and which of them are for validation.

A digest depends on no shard, record form or tokenizer: it is a hash of the text as it is encoded, or of a
conversation's messages. Equal documents have equal digests, and so are on one side of a validation split.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from shardprep.format.names import DIGEST_BYTES

DIGEST = np.dtype(f"V{DIGEST_BYTES}")


def digests_of(texts: Iterable[bytes]) -> npt.NDArray[np.void]:
    """The first 16 bytes of the sha256 of each text of UTF-8: DIGEST[texts]. 1 us and 1 ns per byte each."""
    found = [hashlib.sha256(text).digest()[:DIGEST_BYTES] for text in texts]
    return np.frombuffer(b"".join(found), DIGEST)


def canonical_conversation(messages: str) -> str:
    """What the digest of a conversation is of: its messages in JSON, keys sorted, without their nulls.

    Tables have a null for each key that another message has.
    """
    found = [
        {key: value for key, value in message.items() if value is not None}
        if isinstance(message, dict)
        else message
        for message in json.loads(messages)
    ]
    return json.dumps(found, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def are_for_validation(digests: npt.NDArray[np.void], fraction: float) -> npt.NDArray[np.bool_]:
    """Which documents a fraction chooses, bool[n]: the first 8 bytes are below ``fraction`` * 2**64."""
    firsts = np.ascontiguousarray(digests).view(">u8")[::2]
    return np.asarray(firsts < np.uint64(math.ceil(fraction * 2**64)))
