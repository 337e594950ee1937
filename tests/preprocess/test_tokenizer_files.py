"""What a plan remembers of a tokenizer's folder."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from preprocess.tokenizer_files import describe_tokenizer


def test_a_token_that_the_configuration_does_not_name_is_not_the_word_none(tmp_path: Path) -> None:
    """Llama 3 has no pad token, and its vocabulary has the word None."""
    words = Tokenizer(models.WordLevel({"None": 0, "null": 1, "</s>": 2}, "None"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(tmp_path)
    spec = describe_tokenizer(tmp_path, "model")
    assert (spec.bos_token_id, spec.eos_token_id, spec.pad_token_id) == (None, 2, None)
