"""Which tokenizers give the same ids for a text in pieces; decided once, at planning."""

from __future__ import annotations

from typing import Any

from preprocess.llama3_pipeline import LLAMA3_REGEX
from preprocess.long_documents import CUT

_REGEXES = (
    LLAMA3_REGEX,
    LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}"),  # Qwen 2: a digit a token
)


def can_be_cut(tokenizer: dict[str, Any]) -> bool:
    """Whether a tokenizer.json gives the same ids for text cut where long_documents.CUT says.

    So it is for byte-level BPE behind a known pattern, without a normalizer and without added tokens
    that reach for the white space around them or could be cut themselves. For all others a long document
    is held whole.
    """
    model = tokenizer.get("model") or {}
    parts = tokenizer.get("pre_tokenizer") or {}
    parts = parts.get("pretokenizers", [parts])
    byte_level = parts[-1] if parts else {}
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return False
    if len(parts) == 1:
        known = bool(byte_level.get("use_regex"))
    else:
        split = parts[0]
        pattern = (split.get("pattern") or {}).get("Regex")
        known = len(parts) == 2 and pattern in _REGEXES and not byte_level.get("use_regex")
        known = known and split.get("behavior") == "Isolated" and not split.get("invert")
    plain_bpe = model.get("type") == "BPE" and not any(
        model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    )
    reaching = any(
        token.get("lstrip")
        or token.get("rstrip")
        or any(map(str.isspace, token["content"]))
        or CUT.search(token["content"])
        for token in tokenizer.get("added_tokens") or ()
    )
    return known and plain_bpe and not tokenizer.get("normalizer") and not reaching
