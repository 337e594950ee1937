"""A fingerprint of what decides a tokenizer's ids."""

from __future__ import annotations

import hashlib
import json

# The decoder, truncation and padding change no id of an encoded document.
_DECISIVE = ("added_tokens", "normalizer", "pre_tokenizer", "model", "post_processor")


def tokenizer_fingerprint(tokenizer_json: str) -> str:
    """sha256, in hex, of what decides ids in a ``tokenizer.json``.

    Equal for the files of one tokenizer whether their merges are written ``"a b"`` or
    ``["a", "b"]``, and in whatever order their keys stand.
    """
    data = json.loads(tokenizer_json)
    kept = {name: data.get(name) for name in _DECISIVE}
    merges = (kept["model"] or {}).get("merges")
    if merges:
        kept["model"]["merges"] = [m.split(" ") if isinstance(m, str) else m for m in merges]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
