"""Conversations, chat templates, and forty small tokenizers of every kind."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]

_HEAD = "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
_PROMPT = "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
PLAIN = _HEAD + "{{ m['content'] }}<|eot_id|>{% endfor %}" + _PROMPT
TAGGED = (
    _HEAD + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|eot_id|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|eot_id|>{% endif %}{% endfor %}" + _PROMPT
)
_WORDS = [
    "가나다", "물은", "100도", "kettle", "sings,", "nobody's", "listening",
    "🙂", "é", "☕️", "12345", "도서관", "\n", "끝.",
]  # fmt: skip


def conversations(
    num: int, seed: int = 0, text_of: Callable[[random.Random, int], str] | None = None
) -> list[list[Message]]:
    """Return conversations of a few turns in Korean, English and emoji."""
    chooser, found = random.Random(seed), list[list[Message]]()
    text_of = text_of or (lambda chooser, most: " ".join(chooser.choices(_WORDS, k=chooser.randint(1, most))))
    for _ in range(num):
        found.append([{"role": "system", "content": text_of(chooser, 12)}] * chooser.randint(0, 1))
        for _ in range(chooser.randint(1, 3)):
            for role in ("user", "assistant"):
                found[-1].append({"role": role, "content": text_of(chooser, 12)})
    return found


# Tokenizers, templates and conversations for which loss masks are difficult.

BOS, EOT, THINK = "<|bos|>", "<|eot|>", "<think>"
SPECIAL = [BOS, EOT, "<|pad|>", "<unk>"]
_N, _P = normalizers, pre_tokenizers
_NO_SPACE, _SPACE = _P.ByteLevel(add_prefix_space=False), _P.ByteLevel(add_prefix_space=True)
_ONE_WORD = _P.ByteLevel(add_prefix_space=False, use_regex=False)
_WHOLE, _TRIMMED = processors.ByteLevel(trim_offsets=False), processors.ByteLevel(trim_offsets=True)
_LLAMA2 = _N.Sequence([_N.Prepend("▁"), _N.Replace(" ", "▁")])
_NMT = _N.Sequence([_N.Nmt(), _N.NFKC(), _N.Replace(Regex(" {2,}"), " ")])
_NO_ACCENTS = _N.Sequence([_N.NFD(), _N.StripAccents(), _N.Lowercase()])
_SPLIT = _P.Split(Regex(r"\p{N}{1,3}|\s+|[^\s\p{N}]+"), "isolated")
_TEMPLATE = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
_OF_BERT = processors.BertProcessing((EOT, 1), (BOS, 0))
_OF_ROBERTA = processors.RobertaProcessing((EOT, 1), (BOS, 0))

# Name -> model, pre-tokenizer, normalizer, post-processor.
TOKENIZERS: dict[str, tuple[str, Any, Any, Any]] = {
    "bytes": ("bytes", _NO_SPACE, None, _WHOLE),
    "bytes, space in front": ("bytes", _SPACE, None, _WHOLE),
    "bytes, trimmed": ("bytes", _NO_SPACE, None, _TRIMMED),
    "bytes, trimmed, space in front": ("bytes", _SPACE, None, _TRIMMED),
    "bytes, one word": ("bytes", _ONE_WORD, None, _WHOLE),
    "bytes, NFC": ("bytes", _NO_SPACE, _N.NFC(), _WHOLE),
    "bytes, NFD": ("bytes", _NO_SPACE, _N.NFD(), _WHOLE),
    "bytes, NFKC": ("bytes", _NO_SPACE, _N.NFKC(), _TRIMMED),
    "bytes, NFKD": ("bytes", _NO_SPACE, _N.NFKD(), _TRIMMED),
    "bytes, NFC and lower case": ("bytes", _NO_SPACE, _N.Sequence([_N.NFC(), _N.Lowercase()]), _WHOLE),
    "bytes, stripped": ("bytes", _NO_SPACE, _N.Strip(), _WHOLE),
    "bytes, digits": ("bytes", _P.Sequence([_P.Digits(individual_digits=True), _NO_SPACE]), None, _WHOLE),
    "bytes, split": ("bytes", _P.Sequence([_SPLIT, _ONE_WORD]), None, _WHOLE),
    "bytes, words without blanks": ("bytes", _P.Sequence([_P.WhitespaceSplit(), _NO_SPACE]), None, _WHOLE),
    "bytes, BOS": ("bytes", _NO_SPACE, None, _TEMPLATE),
    "bytes, Roberta": ("bytes", _NO_SPACE, None, _OF_ROBERTA),
    "bytes, alphabet alone": ("alphabet", _NO_SPACE, None, _WHOLE),
    "bytes, no digits left": ("bytes", _NO_SPACE, _N.Replace(Regex("[0-9]+"), ""), _WHOLE),
    "bytes, blanks joined": ("bytes", _NO_SPACE, _N.Replace(Regex(r"\s+"), " "), _WHOLE),
    "bytes, longer letters": ("bytes", _NO_SPACE, _N.Replace("e", "eee"), _WHOLE),
    "Llama 2": ("fallback", None, _LLAMA2, None),
    "Llama 2, NFC": ("fallback", None, _N.Sequence([_N.NFC(), _LLAMA2]), None),
    "Metaspace": ("fallback", _P.Metaspace(), None, None),
    "Metaspace, first": ("fallback", _P.Metaspace(prepend_scheme="first"), None, None),
    "Metaspace, never": ("fallback", _P.Metaspace(prepend_scheme="never", split=False), None, None),
    "BPE, letters": ("bpe", _P.Whitespace(), None, None),
    "BPE, suffix": ("bpe with suffix", _P.WhitespaceSplit(), _N.NFC(), None),
    "Unigram": ("unigram", _P.Metaspace(), _N.NFKC(), None),
    "Unigram, Nmt": ("unigram", _P.Metaspace(prepend_scheme="first"), _NMT, None),
    "Unigram, T5": (
        "unigram", _P.Sequence([_P.WhitespaceSplit(), _P.Metaspace()]), _N.Strip(left=False, right=True), None
    ),
    "Unigram, NFD": ("unigram", _P.Metaspace(), _N.NFD(), None),
    "Bert": ("wordpiece", _P.BertPreTokenizer(), _N.BertNormalizer(), None),
    "Bert, cased": ("wordpiece", _P.BertPreTokenizer(), _N.BertNormalizer(lowercase=False), _OF_BERT),
    "WordPiece, no accents": ("wordpiece", _P.Whitespace(), _NO_ACCENTS, None),
    "WordPiece, NFC": ("wordpiece", _P.Whitespace(), _N.NFC(), None),
    "words": ("words", _P.WhitespaceSplit(), None, None),
    "words, NFC": ("words", _P.Whitespace(), _N.NFC(), None),
    "words, stripped": ("words", _P.Sequence([_P.Punctuation(), _P.WhitespaceSplit()]), _N.Strip(), None),
    "words, scripts": ("words", _P.Sequence([_P.UnicodeScripts(), _P.WhitespaceSplit()]), None, None),
    "words, no pre-tokenizer": ("words", None, None, None),
}  # fmt: skip

_TURN = "{{ m['role'] }}:\n"
_IS_ANSWER = "{% if m['role'] == 'assistant' %}"
_REST = "{% else %}" + _TURN + "{{ m['content'] }}" + EOT + "{% endif %}{% endfor %}"
_LOOP = "{{ bos_token }}{% for m in messages %}" + _IS_ANSWER
_OPEN, _CLOSE = "{% generation %}", "{% endgeneration %}"
TEMPLATES = {
    "content": _LOOP + _TURN + _OPEN + "{{ m['content'] }}" + _CLOSE + EOT + _REST,
    "content and its end": _LOOP + _TURN + _OPEN + "{{ m['content'] }}" + EOT + _CLOSE + "\n" + _REST,
    "whole turn": _LOOP + _OPEN + _TURN + "{{ m['content'] }}\n" + _CLOSE + _REST,
    "begins with blanks": _LOOP + _TURN.strip() + _OPEN + "  \n{{ m['content'] }} end " + _CLOSE + _REST,
    "inside words": (
        _LOOP + "pre{%+ generation -%} fix{{ m['content'] }}한 {%- endgeneration -%} 글post" + _REST
    ),
    "several blocks": (
        _LOOP + _OPEN + "{{ m['content'][:3] }}" + _CLOSE + _OPEN + "{{ m['content'][3:5] }}" + _CLOSE
        + "{{ m['content'][5:7] }}" + _OPEN + "{{ m['content'][7:] }}" + _CLOSE + _REST
    ),
    "empty blocks": (
        "{{ bos_token }}{% for m in messages %}a" + _OPEN + _CLOSE + "b" + _IS_ANSWER + "x" + _OPEN
        + "{{ m['content'] }}" + _CLOSE + _REST
    ),
    "trimmed": (
        _LOOP + "{{ '<|x|>' }}" + _OPEN + "{{ m['content'] | trim | upper }}" + _CLOSE + "</s>" + _REST
    ),
    "reasoning": (
        _LOOP + _TURN + _OPEN + THINK + "\n{{ m['content'] | replace('o', '<b>o</b>') }}\n</think>" + _CLOSE
        + "{{ m.get('tool_calls') | tojson }}" + _REST
    ),
    # transformers counts positions in the text written so far, so it reports such blocks elsewhere.
    "in a variable": (
        _LOOP + "{% set text %}" + _OPEN + "{{ m['content'] }}" + _CLOSE + "{% endset %}" + _TURN
        + "{{ text }}" + _REST
    ),
    "without tags": (
        "{% for m in messages %}" + _TURN + "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}"
        "assistant:\n{% endif %}"
    ),
    "without tags, ChatML": (
        "{% for m in messages %}<|im_start|>" + _TURN + "{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:\n{% endif %}"
    ),
}  # fmt: skip

_PIECES = [
    "가나다", "한국어를", "읽는다.", "뷁", "쀍쀍", "\u1112\u1161\u11ab", "漢字", "kettle", "sings,",
    "nobody's", "un<b>believ</b>able", "🙂", "👩\u200d👩\u200d👧", "☕️", "é", "e\u0301", "ﬁne", "İstanbul",
    "½", "Straße", "12345", "ｆｕｌｌ", "Å\u212b", "x" * 40, "\n", "\n\n", "\t", "  ", "▁", "\u200b",
    "<think>", "</think>", f"ca{EOT}t", EOT,
]  # fmt: skip


_BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
_UNKNOWN = {"unk_token": "<unk>"}
_SUFFIX = {"end_of_word_suffix": "</w>"}
_ALPHABET = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
_WITH_BYTES = {"limit_alphabet": 80, "special_tokens": [*SPECIAL, *_BYTE_PIECES]}
# Kind -> constructor of a model, and class and options of its trainer.
_MODELS: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "bytes": (models.BPE, trainers.BpeTrainer, _ALPHABET),
    "alphabet": (models.BPE, trainers.BpeTrainer, {**_ALPHABET, "vocab_size": 0}),
    "fallback": (
        lambda: models.BPE(byte_fallback=True, fuse_unk=True, **_UNKNOWN), trainers.BpeTrainer, _WITH_BYTES
    ),
    "bpe": (lambda: models.BPE(**_UNKNOWN), trainers.BpeTrainer, {}),
    "bpe with suffix": (lambda: models.BPE(**_UNKNOWN, **_SUFFIX), trainers.BpeTrainer, _SUFFIX),
    "unigram": (models.Unigram, trainers.UnigramTrainer, _UNKNOWN),
    "wordpiece": (lambda: models.WordPiece(**_UNKNOWN), trainers.WordPieceTrainer, {}),
    "words": (lambda: models.WordLevel(**_UNKNOWN), trainers.WordLevelTrainer, {"vocab_size": 200}),
}  # fmt: skip


def save_tokenizer(name: str, folder: Path) -> Path:
    """Train one of TOKENIZERS and save it into a folder."""
    kind, pre, normalizer, post = TOKENIZERS[name]
    model, trainer, options = _MODELS[kind]
    tokenizer = Tokenizer(model())
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    settings = {"vocab_size": 500, "show_progress": False, "special_tokens": SPECIAL, **options}
    tokenizer.train_from_iterator([_text(random.Random(n), 12) for n in range(60)], trainer(**settings))
    if kind == "fallback":  # byte tokens were special in training only, so that they have ids
        head = json.loads(tokenizer.to_str())
        head["added_tokens"] = [token for token in head["added_tokens"] if token["content"] in SPECIAL]
        tokenizer = Tokenizer.from_str(json.dumps(head))
    if post is not None:
        tokenizer.post_processor = post
    tokenizer.add_tokens(
        [AddedToken(THINK, normalized=False), AddedToken("</think>", lstrip=True, rstrip=True)]
    )
    named = {"bos_token": BOS, "eos_token": EOT, "pad_token": "<|pad|>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return folder


def _text(chooser: random.Random, most: int) -> str:
    pieces = chooser.choices(_PIECES, k=chooser.randint(0, most))
    text = "".join(piece + chooser.choice(["", " ", " "]) for piece in pieces)
    return unicodedata.normalize(chooser.choice(["NFC", "NFD"]), text)


def odd_conversations(num: int, seed: int) -> list[list[Message]]:
    """Return conversations with decomposed Korean, emoji, tags in words, empty answers and tool calls."""
    chooser, found = random.Random(seed), conversations(num, seed, _text)
    for chat in found:
        if chooser.random() < 0.4:
            call = {"name": "look", "arguments": {"for": _text(chooser, 3)}}
            chat[-1]["tool_calls"] = [{"type": "function", "function": call}]
            for role in ("tool", "assistant"):
                chat.append({"role": role, "content": _text(chooser, 4)})
    return found
