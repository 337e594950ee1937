"""What Llama 3's tokenizer is apart from its vocabulary: pre-tokenizer, post-processor, special tokens.

Read off the tokenizer.json of Llama 3.1; tests compare the two where it is at hand.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"
_NAMED = {
    0: BOS,
    1: EOS,
    4: PAD,
    5: "<|step_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
    11: "<|image|>",
}


def special_tokens() -> list[str]:
    """Llama 3.1's 256 special tokens in the order of their ids, which follow the base vocabulary."""
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(256))
    return [_NAMED.get(position) or next(reserved) for position in range(256)]


def untrained_tokenizer() -> Tokenizer:
    """Llama 3's pipeline around an empty BPE model."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def add_special_tokens(tokenizer: Tokenizer) -> None:
    """Append the special tokens after the base vocabulary, and prepend BOS to whatever is encoded."""
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special_tokens()]
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(add_prefix_space=True, trim_offsets=False, use_regex=True),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS} $B",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            ),
        ]
    )
