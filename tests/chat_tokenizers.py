"""Forty small tokenizers of every kind, twelve chat templates, and conversations that make masks go wrong."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOT, THINK = "<|bos|>", "<|eot|>", "<think>"
SPECIAL = [BOS, EOT, "<|pad|>", "<unk>"]
_N, _P = normalizers, pre_tokenizers
_BYTES = {"model": "bytes", "post": processors.ByteLevel(trim_offsets=False)}
_TRIMMED = {"model": "bytes", "post": processors.ByteLevel(trim_offsets=True)}
_NO_SPACE = _P.ByteLevel(add_prefix_space=False)
_LLAMA2 = _N.Sequence([_N.Prepend("▁"), _N.Replace(" ", "▁")])
_SPLIT = _P.Split(Regex(r"\p{N}{1,3}|\s+|[^\s\p{N}]+"), "isolated")
_TEMPLATE = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])

TOKENIZERS: dict[str, dict[str, Any]] = {
    "bytes": {**_BYTES, "pre": _NO_SPACE},
    "bytes, space in front": {**_BYTES, "pre": _P.ByteLevel(add_prefix_space=True)},
    "bytes, trimmed": {**_TRIMMED, "pre": _NO_SPACE},
    "bytes, trimmed, space in front": {**_TRIMMED, "pre": _P.ByteLevel(add_prefix_space=True)},
    "bytes, one word": {**_BYTES, "pre": _P.ByteLevel(add_prefix_space=False, use_regex=False)},
    "bytes, NFC": {**_BYTES, "pre": _NO_SPACE, "normalizer": _N.NFC()},
    "bytes, NFD": {**_BYTES, "pre": _NO_SPACE, "normalizer": _N.NFD()},
    "bytes, NFKC": {**_TRIMMED, "pre": _NO_SPACE, "normalizer": _N.NFKC()},
    "bytes, NFKD": {**_TRIMMED, "pre": _NO_SPACE, "normalizer": _N.NFKD()},
    "bytes, NFC and lower case": {
        **_BYTES, "pre": _NO_SPACE, "normalizer": _N.Sequence([_N.NFC(), _N.Lowercase()])
    },
    "bytes, stripped": {**_BYTES, "pre": _NO_SPACE, "normalizer": _N.Strip()},
    "bytes, digits": {**_BYTES, "pre": _P.Sequence([_P.Digits(individual_digits=True), _NO_SPACE])},
    "bytes, split": {
        **_BYTES, "pre": _P.Sequence([_SPLIT, _P.ByteLevel(add_prefix_space=False, use_regex=False)])
    },
    "bytes, words without blanks": {**_BYTES, "pre": _P.Sequence([_P.WhitespaceSplit(), _NO_SPACE])},
    "bytes, BOS": {"model": "bytes", "pre": _NO_SPACE, "post": _TEMPLATE},
    "bytes, Roberta": {
        "model": "bytes", "pre": _NO_SPACE, "post": processors.RobertaProcessing((EOT, 1), (BOS, 0))
    },
    "bytes, alphabet alone": {**_BYTES, "pre": _NO_SPACE, "vocab_size": 0},
    "bytes, no digits left": {
        **_BYTES, "pre": _NO_SPACE, "normalizer": _N.Replace(Regex("[0-9]+"), "")
    },
    "bytes, blanks joined": {**_BYTES, "pre": _NO_SPACE, "normalizer": _N.Replace(Regex(r"\s+"), " ")},
    "bytes, longer letters": {**_BYTES, "pre": _NO_SPACE, "normalizer": _N.Replace("e", "eee")},
    "Llama 2": {"model": "fallback", "normalizer": _LLAMA2},
    "Llama 2, NFC": {"model": "fallback", "normalizer": _N.Sequence([_N.NFC(), _LLAMA2])},
    "Metaspace": {"model": "fallback", "pre": _P.Metaspace()},
    "Metaspace, first": {"model": "fallback", "pre": _P.Metaspace(prepend_scheme="first")},
    "Metaspace, never": {"model": "fallback", "pre": _P.Metaspace(prepend_scheme="never", split=False)},
    "BPE, letters": {"model": "bpe", "pre": _P.Whitespace()},
    "BPE, suffix": {"model": "bpe", "pre": _P.WhitespaceSplit(), "suffix": "</w>", "normalizer": _N.NFC()},
    "Unigram": {"model": "unigram", "pre": _P.Metaspace(), "normalizer": _N.NFKC()},
    "Unigram, Nmt": {
        "model": "unigram", "pre": _P.Metaspace(prepend_scheme="first"),
        "normalizer": _N.Sequence([_N.Nmt(), _N.NFKC(), _N.Replace(Regex(" {2,}"), " ")]),
    },
    "Unigram, T5": {
        "model": "unigram", "pre": _P.Sequence([_P.WhitespaceSplit(), _P.Metaspace()]),
        "normalizer": _N.Strip(left=False, right=True),
    },
    "Unigram, NFD": {"model": "unigram", "pre": _P.Metaspace(), "normalizer": _N.NFD()},
    "Bert": {"model": "wordpiece", "pre": _P.BertPreTokenizer(), "normalizer": _N.BertNormalizer()},
    "Bert, cased": {
        "model": "wordpiece", "pre": _P.BertPreTokenizer(),
        "normalizer": _N.BertNormalizer(lowercase=False),
        "post": processors.BertProcessing((EOT, 1), (BOS, 0)),
    },
    "WordPiece, no accents": {
        "model": "wordpiece", "pre": _P.Whitespace(),
        "normalizer": _N.Sequence([_N.NFD(), _N.StripAccents(), _N.Lowercase()]),
    },
    "WordPiece, NFC": {"model": "wordpiece", "pre": _P.Whitespace(), "normalizer": _N.NFC()},
    "words": {"model": "words", "pre": _P.WhitespaceSplit()},
    "words, NFC": {"model": "words", "pre": _P.Whitespace(), "normalizer": _N.NFC()},
    "words, stripped": {
        "model": "words", "pre": _P.Sequence([_P.Punctuation(), _P.WhitespaceSplit()]),
        "normalizer": _N.Strip(),
    },
    "words, scripts": {"model": "words", "pre": _P.Sequence([_P.UnicodeScripts(), _P.WhitespaceSplit()])},
    "words, no pre-tokenizer": {"model": "words"},
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
    # transformers counts from the beginning of what it has written, so such blocks are told elsewhere.
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


def save_tokenizer(name: str, folder: Path) -> Path:
    """Train one of TOKENIZERS and save it as a model's folder."""
    kind = TOKENIZERS[name]
    texts = [_text(random.Random(number), 12) for number in range(60)]
    more: dict[str, Any] = {"vocab_size": kind.get("vocab_size", 500), "show_progress": False}
    suffix = {"end_of_word_suffix": kind["suffix"]} if "suffix" in kind else {}
    special = [*SPECIAL, *_BYTE_PIECES] if kind["model"] == "fallback" else SPECIAL
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    unknown = {"unk_token": "<unk>"}
    # A model, and the class and the options of its trainer.
    made: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "bytes": (models.BPE(), trainers.BpeTrainer, {"initial_alphabet": alphabet}),
        "fallback": (
            models.BPE(byte_fallback=True, fuse_unk=True, **unknown), trainers.BpeTrainer,
            {"limit_alphabet": 80},
        ),
        "bpe": (models.BPE(**unknown, **suffix), trainers.BpeTrainer, suffix),
        "unigram": (models.Unigram(), trainers.UnigramTrainer, unknown),
        "wordpiece": (models.WordPiece(**unknown), trainers.WordPieceTrainer, {}),
        "words": (models.WordLevel(**unknown), trainers.WordLevelTrainer, {"vocab_size": 200}),
    }  # fmt: skip
    model, trainer, options = made[kind["model"]]
    tokenizer = Tokenizer(model)
    for part, value in (("normalizer", kind.get("normalizer")), ("pre_tokenizer", kind.get("pre"))):
        if value is not None:
            setattr(tokenizer, part, value)
    tokenizer.train_from_iterator(texts, trainer(special_tokens=special, **{**more, **options}))
    if special is not SPECIAL:  # bytes were learned as if they were special, so that they have ids
        head = json.loads(tokenizer.to_str())
        head["added_tokens"] = [token for token in head["added_tokens"] if token["content"] in SPECIAL]
        tokenizer = Tokenizer.from_str(json.dumps(head))
    if kind.get("post") is not None:
        tokenizer.post_processor = kind["post"]
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


def conversations(num: int, seed: int) -> list[list[dict[str, Any]]]:
    """Conversations of Korean, composed or not, emoji, tags inside words, empty and blank answers, tools."""
    chooser = random.Random(seed)
    found = []
    for _ in range(num):
        turns: list[dict[str, Any]] = []
        if chooser.random() < 0.3:
            turns.append({"role": "system", "content": _text(chooser, 6)})
        for _ in range(chooser.randint(1, 4)):
            turns.append({"role": "user", "content": _text(chooser, 8)})
            turns.append({"role": "assistant", "content": _text(chooser, 8)})
            if chooser.random() < 0.2:
                call = {
                    "type": "function",
                    "function": {"name": "look", "arguments": {"for": _text(chooser, 3)}},
                }
                turns[-1]["tool_calls"] = [call]
                turns.append({"role": "tool", "content": _text(chooser, 4)})
                turns.append({"role": "assistant", "content": _text(chooser, 4)})
        found.append(turns)
    return found
