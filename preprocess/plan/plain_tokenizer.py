"""Models whose tokenizer.json transformers takes as it is, so that planning need not load transformers."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from tokenizers import Tokenizer, processors

from preprocess.plan.model_files import (
    ADDED_TOKENS,
    COPIED,
    MODEL_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    Files,
    json_object,
    special_tokens_of,
)
from shardprep import errors
from shardprep.foreign_tokenizer import ForeignTokenizer
from shardprep.format.names import TOKENIZER_FILE

# With these classes, keys and models in the configuration, transformers 5 takes tokenizer.json as it is.
# Other keys may change ids, or have not been tested.
_PLAIN_TRANSFORMERS = "5."
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_PLAIN_MODELS = (None, "llama")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
PLAIN_KEYS = {
    *_NAMED, *_LISTED, "added_tokens_decoder", "tokenizer_class", "backend", "chat_template",
    "clean_up_tokenization_spaces", "is_local", "local_files_only", "model_input_names", "model_max_length",
    "name_or_path", "padding_side", "truncation_side",
}  # fmt: skip


def plain_files(given: Files, name: str) -> tuple[Files, ForeignTokenizer] | None:
    """Return the files that transformers would save, and the tokenizer, or None if it might change ids."""
    try:
        data, config, model, named = (
            json_object(given, name)
            for name in (TOKENIZER_FILE, TOKENIZER_CONFIG, MODEL_CONFIG, SPECIAL_TOKENS_MAP)
        )
        added = {str(token["id"]): token for token in data.get("added_tokens") or []}
        tokens: list[Any] = []
        for each in (config, named):
            tokens += map(each.get, _NAMED)
            for role in _LISTED:
                tokens += each.get(role) or []
        contents = {token["content"] if isinstance(token, dict) else token for token in tokens}
        decoder: dict[str, dict[str, Any]] = config.get("added_tokens_decoder") or {}
        if not (
            version("transformers").startswith(_PLAIN_TRANSFORMERS)
            and config.get("tokenizer_class") in _PLAIN_CLASSES
            and config.keys() <= PLAIN_KEYS
            and model.get("model_type") in _PLAIN_MODELS
            and not model.keys() & {"tokenizer_class", "auto_map"}
            and not (ADDED_TOKENS in given or data.get("truncation") or data.get("padding"))
            and named.keys() <= {*_NAMED, *_LISTED}
            and special_tokens_of({**config, **named}) == special_tokens_of(config)
            and contents <= {None, *(token["content"] for token in added.values())}
            and all({"id": int(number), **token} == added.get(number) for number, token in decoder.items())
        ):
            return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, errors.BrokenShard):
        return None  # transformers will report what is wrong
    try:
        tokenizer = ForeignTokenizer(given[TOKENIZER_FILE], name)
    except errors.ReadWriteError:  # it is no tokenizer
        return None
    tokenizer.set_up(_add_processor)
    copied = {name: given[name] for name in COPIED if name in given}
    # Like transformers, let tokenizers write the file.
    return {TOKENIZER_FILE: tokenizer.call(_written).encode(), **copied}, tokenizer


def _add_processor(tokenizer: Tokenizer) -> None:
    if tokenizer.post_processor is None:
        tokenizer.post_processor = processors.TemplateProcessing("$A:0", "$A:0 $B:1", special_tokens=[])


def _written(tokenizer: Tokenizer) -> str:
    return str(tokenizer.to_str(pretty=True))
