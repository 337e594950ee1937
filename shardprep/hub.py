"""Tokenizers of models on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shardprep.errors import NotFound

_FILE_PATTERNS = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
_FILE_PATTERNS += ["config.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model"]
_FILE_PATTERNS += ["*.tiktoken", "tekken.json", "additional_chat_templates/*.jinja"]
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_URL = re.compile(r"(?:https?|hf)://(?:huggingface\.co/|hf\.co/)?([\w-][\w.-]*/[\w-][\w.-]*)/?.*")


def find_on_hub(model_id: str) -> tuple[Path, str]:
    """Download a model's tokenizer. Return its folder in the cache, and what transformers is to load."""
    if os.path.isfile(model_id):  # noqa: PTH113 - Path.is_file() would raise
        folder = os.path.dirname(model_id) or "."  # noqa: PTH120
        expected = f"the folder of a tokenizer.json, here {folder}"
        raise NotFound(path=model_id, found="a file", expected=expected, remedy=folder)
    url = _URL.fullmatch(model_id)
    if url:
        raise NotFound(path=model_id, found="a URL", expected=f"a name, {url[1]}", remedy=url[1])
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    if not _NAME.fullmatch(model_id):
        raise no_tokenizer(model_id, "there is no such folder")
    try:
        return Path(snapshot_download(model_id, allow_patterns=_FILE_PATTERNS)), model_id
    except Exception as error:  # from the network, the hub or the disk
        reason = words_of_fault(error.__cause__ or error)
    # transformers gets the folder: given the name, it would ask the hub twelve more times, in 50 s.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        cached = try_to_load_from_cache(model_id, name)
        if isinstance(cached, str):
            return Path(cached).parent, str(Path(cached).parent)
    raise no_tokenizer(model_id, reason)


def no_tokenizer(model_id: str, reason: str) -> NotFound:
    """Build the error for a model without a usable tokenizer, with what to type."""
    expected = "a folder with a tokenizer.json"
    advice = None
    if not os.path.isdir(model_id) and _NAME.fullmatch(model_id):  # noqa: PTH112 - Path.is_dir() would raise
        expected += ", or a model's name on the hub"
        advice = (
            "if the model is gated: hf auth login; without a network, run this elsewhere: "
            f"hf download {model_id} --include '*.json' --include '*.jinja' --local-dir MODEL"
        )
    found = f"no usable tokenizer ({reason})"
    return NotFound(path=model_id, found=found, expected=expected, advice=advice)


def is_library_fault(error: BaseException) -> bool:
    """Return whether a library may have raised this: an Exception, or a Rust panic, which is not one."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def words_of_fault(error: BaseException) -> str:
    """Return a library's error message as one short line."""
    said = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {said}" if isinstance(error, Exception) else f"it panicked: {said}"
