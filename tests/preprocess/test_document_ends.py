"""What documents begin and end with, for the tokenizers of several families: told, kept, and switched."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from tests.conftest import Prep

LINES = ["Snow falls in winter.", "겨울에는 눈이 내립니다.", "Tea is ready after 4 minutes!"]
SPECIAL = ["<unk>", "<s>", "</s>", "[CLS]", "[SEP]"]
BEGIN, END, CLS, SEP = 1, 2, 3, 4


def _template(single: str) -> Callable[[], Any]:
    tokens = [("<s>", BEGIN), ("</s>", END)]
    return lambda: processors.TemplateProcessing(single=single, special_tokens=tokens)


def _bert() -> Any:
    return processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))


def _roberta() -> Any:
    return processors.RobertaProcessing(("</s>", END), ("<s>", BEGIN))


# Of each family: its kind of model, its post-processor, the ids before and after a text, and its EOS.
FAMILIES: dict[str, tuple[str, Callable[[], Any] | None, list[int], list[int], str | None]] = {
    "llama": ("bpe", _template("<s> $A"), [BEGIN], [], "</s>"),
    "llama with add_eos_token": ("bpe", _template("<s> $A </s>"), [BEGIN], [END], "</s>"),
    "qwen": ("bpe", None, [], [], "</s>"),
    "roberta": ("bpe", _roberta, [BEGIN], [END], "</s>"),
    "t5": ("unigram", _template("$A </s>"), [], [END], "</s>"),
    "gemma": ("unigram", _template("<s> $A"), [BEGIN], [], "</s>"),
    "bert": ("wordpiece", _bert, [CLS], [SEP], None),
}


def _save(folder: Path, kind: str, processor: Callable[[], Any] | None, eos: str | None) -> Path:
    """A tokenizer of a family, trained on LINES."""
    alphabet = sorted({character for line in LINES for character in line})
    if kind == "bpe":
        tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=100, special_tokens=SPECIAL, unk_token="<unk>")
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(LINES, trainer)
    if processor is not None:
        tokenizer.post_processor = processor()
    named = {"bos_token": "<s>"} | ({"eos_token": eos} if eos else {})
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return folder


def _said(ids: list[int]) -> str:
    return f"with {SPECIAL[ids[0]]} ({ids[0]})" if ids else "without a control token"


def _expected_line(before: list[int], after: list[int]) -> str:
    if not (before or after):
        return "documents begin and end without a control token"
    return f"documents begin {_said(before)} and end {_said(after)}"


def _documents(data: Path) -> list[list[int]]:
    with tarfile.open(data / "shard-00000.tar") as tar:
        ids = [tar.extractfile(item) for item in tar if item.name.endswith(".token_ids.json")]
        return [json.load(file) for file in ids if file]


def _row(data: Path) -> list[int]:
    with tarfile.open(data / "shard-00000.tar") as tar:
        (file,) = [tar.extractfile(item) for item in tar if item.name.endswith(".token_ids.npy")]
        assert file is not None
        ids: list[int] = np.load(io.BytesIO(file.read())).flatten().tolist()
        return ids


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_text("\n".join(LINES))
    return tmp_path / "raw"


@pytest.mark.parametrize("adds", [True, False], ids=["added", "bare"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_s_documents_begin_and_end_as_told(
    family: str, adds: bool, prep: Prep, raw: Path, tmp_path: Path
) -> None:
    kind, processor, before, after, eos = FAMILIES[family]
    model = _save(tmp_path / "model", kind, processor, eos)
    reference = AutoTokenizer.from_pretrained(model)
    expected = [reference.encode(line, add_special_tokens=adds) for line in LINES]
    before, after = (before, after) if adds else ([], [])
    flags = [] if adds else ["--no-add_special_tokens"]

    data = tmp_path / "D"
    given = ["--input_dir", raw, "--output_dir", data, "--model_id", model, *flags]
    planned = prep.command("plan", *given)
    assert planned.code == 0, planned.text
    assert _expected_line(before, after) in planned.text
    prep.make(data)
    assert _documents(data) == expected
    doctor = prep.command("doctor", "--output_dir", data)
    assert _expected_line(before, after) in doctor.text
    assert prep.command("verify", data).code == 0

    if eos is None:
        return
    rows = tmp_path / "R"
    ended = prep.command("plan", *given[:3], rows, *given[4:], "--record", "packed", "--seq_len", 4096)
    assert _expected_line(before, [END]) in ended.text
    prep.make(rows)
    once = [ids if ids[-1] == END else [*ids, END] for ids in expected]
    assert _row(rows)[: sum(map(len, once))] == [token for ids in once for token in ids]


def test_a_conversation_s_ends_are_not_to_be_switched(prep: Prep, raw: Path, tmp_path: Path) -> None:
    given = ["--input_dir", raw, "--output_dir", tmp_path / "D", "--model_id", prep.model_dir]
    refused = prep.command("plan", *given, "--record", "chat", "--no-add_special_tokens")
    assert refused.code == 2
    assert "--add_special_tokens" in refused.text
