"""Tokenizers whose word ``w7`` has the id 7, for tests that choose the ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def save_word_tokenizer(
    folder: Path, num_words: int, *, splits: bool = False, chat_template: str | None = None
) -> str:
    """Save a tokenizer with ``num_words`` ids, the last two being pad and EOS, and return the folder's name.

    ``splits``: split a text at white space. By default a text is one word.
    """
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(num_words)}, "w0"))
    if splits:
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=f"w{num_words - 2}",
        eos_token=f"w{num_words - 1}",
        chat_template=chat_template,
    ).save_pretrained(folder)
    return str(folder)
