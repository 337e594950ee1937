"""A tokenizer as transformers saves it, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from preprocess.make.probe import PROBE
from preprocess.make.reference import load_tokenizer, reference_engine
from preprocess.plan.model_files import (
    TOKENIZER_CONFIG,
)
from preprocess.plan.plain_tokenizer import PLAIN_KEYS
from preprocess.read.formats import Texts
from shardprep import errors, files
from shardprep.format.names import TOKENIZER_FILE
from shardprep.hub import is_library_fault, no_tokenizer, words_of_fault

# What transformers may take to load and save a tokenizer of 256,000 tokens, several times over.
SAVE_MEMORY_BYTES = 4 << 30
SAVE_CPU_S = 300
# Settings that change no ids but that a user sees. They are kept, from the configuration or the class.
_SHOWN_KEYS = ("chat_control_tokens", "processor_class", "response_schema", "response_template")
_SHOWN_ATTRIBUTES = (
    "clean_up_tokenization_spaces", "model_input_names", "model_max_length", "padding_side",
    "split_special_tokens", "truncation_side",
)  # fmt: skip


def save_tokenizer(model_id: str, folder: Path) -> str:
    """Save a model's tokenizer with transformers, so that it loads from ``folder`` unchanged.

    Returns the class as which transformers loaded it.

    transformers may load another tokenizer from the files that it saved, because it builds those of many
    classes from the vocabulary each time. So the saved configuration names the class that takes
    tokenizer.json as it is, and has only settings that a user sees. torch cannot be imported afterwards.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would take address space
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers  # noqa: F401  takes some of both

    from shardprep.limited_process import limit_this_process

    limit_this_process(SAVE_MEMORY_BYTES, SAVE_CPU_S)
    tokenizer = _auto_tokenizer(model_id)
    kind = type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        expected = "a fast one: a copy of the model with a tokenizer.json, or convert it with transformers"
        raise errors.UsageError(path=model_id, found=f"a slow tokenizer ({kind})", expected=expected)
    path = folder / TOKENIZER_CONFIG
    try:
        # Save several chat templates in tokenizer_config.json, not in a folder of their own.
        several = isinstance(getattr(tokenizer, "chat_template", None), dict)
        tokenizer.save_pretrained(str(folder), **({"save_jinja_files": False} if several else {}))
        config = json.loads(path.read_bytes())
        kept = {*PLAIN_KEYS, *_SHOWN_KEYS, *tokenizer.special_tokens_map}
        config = {name: config[name] for name in config if name in kept}
        # The plain class does not know defaults that this class may have.
        config |= {name: getattr(tokenizer, name) for name in _SHOWN_ATTRIBUTES}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
    except Exception as error:  # tokenizers raises an Exception itself, of no other class
        found = f"its files cannot be written: {error}"
        expected = "some space (df; TMPDIR)"
        raise errors.CannotWrite(path=folder, found=found, expected=expected) from None
    # The saved files must load as the same tokenizer, and encode the same ids.
    wrong = ""
    if _auto_tokenizer(str(folder)).backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
        wrong = "whose saved files transformers loads as another tokenizer"
    # Control tokens are allowed here as by transformers, whatever the plan says.
    allow = not tokenizer.split_special_tokens
    saved = load_tokenizer(folder / TOKENIZER_FILE)
    engine = reference_engine(saved, allow_special_tokens=allow, name=model_id)
    ids = [document.tolist() for document in engine.encode(Texts.of_strings(PROBE)).documents()]
    try:
        if tokenizer(list(PROBE))["input_ids"] != ids:
            wrong = wrong or "which changes texts before its tokenizer.json encodes them"
    except Exception as error:
        wrong = f"which encodes no plain text ({words_of_fault(error)})"
    if wrong:
        expected = f"PreTrainedTokenizerFast as tokenizer_class in the {TOKENIZER_CONFIG} of a copy of it"
        raise errors.UsageError(path=model_id, found=f"a {kind}, {wrong}", expected=expected)
    return kind


def _auto_tokenizer(model_id: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
    except BaseException as error:
        if not is_library_fault(error):
            raise
        reason = words_of_fault(error)
        models = sorted(path for path in Path(model_id).glob("*.model") if path.is_file())
        if models and not (Path(model_id) / TOKENIZER_FILE).exists():
            # transformers takes any such vocabulary for one of tiktoken, which has lines of text.
            line = files.read_beginning(models[0], 1000).partition(b"\n")[0]
            is_tiktoken = re.fullmatch(rb"[A-Za-z0-9+/=]+ [0-9]+\s*", line)
            libraries = "tiktoken" if is_tiktoken else "sentencepiece protobuf"
            reason = f"only {models[0].name}; to let transformers convert it: pip install {libraries}"
        raise no_tokenizer(model_id, reason) from None
    if tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():  # transformers 5.0 makes one up
        raise no_tokenizer(model_id, f"{type(tokenizer).__name__} without a vocabulary: a file is missing")
    return tokenizer
