"""Tokenizers whose word ``w7`` has the id 7, for tests that make the ids themselves."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def save_word_tokenizer(folder: Path, num_words: int) -> str:
    """Save one with ``num_words`` ids, of which the last two are pad and EOS; returns the folder's name."""
    vocab = {f"w{number}": number for number in range(num_words)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, "w0")),
        pad_token=f"w{num_words - 2}",
        eos_token=f"w{num_words - 1}",
    ).save_pretrained(folder)
    return str(folder)
