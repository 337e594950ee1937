"""Shards have the ids that AutoTokenizer gives, and a data set's own tokenizer loads as what made them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from loader import get_llama3_dataloader
from shardprep.__main__ import main

if TYPE_CHECKING:
    from tests.conftest import Prep

CONTROL_TOKENS = ("<unk>", "<s>", "</s>")


def texts() -> list[str]:
    """Documents of a line, with much that tokenizers treat in different ways."""
    chosen = random.Random(7)
    parts = [
        "hello",
        " ",
        "moon",
        "world",
        "one",
        ",",
        "don't",
        "안녕",
        "바다",
        "e\u0301",
        "ＡＢ",
        "½",
        "▁",
        "\u200b",
    ]
    lines = {
        "".join(chosen.choices([*parts, " ", "hello wor", "한", "👩‍👧"], k=9)).strip() for _ in range(300)
    }
    return sorted(lines)


def sentence_pieces() -> Tokenizer:
    """BPE with bytes to fall back on, with the normalizer of Llama 2's old files, and added tokens."""
    vocab = {
        **{token: n for n, token in enumerate(CONTROL_TOKENS)},
        **{f"<0x{n:02X}>": 3 + n for n in range(256)},
    }
    pieces = [*"▁abcdefghijklmnopqrstuvwxyz0123456789.,!안녕바다", "he", "ll", "hell", "hello", "▁hello"]
    vocab |= {piece: len(vocab) + n for n, piece in enumerate(pieces)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    pieces_model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(pieces_model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    tokenizer.add_tokens([AddedToken("hello wor", lstrip=True, normalized=False), AddedToken("moon")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*CONTROL_TOKENS, *alphabet, "he", "Ġhe"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "he")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    return folder


KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "LlamaTokenizer, legacy": (sentence_pieces, {"tokenizer_class": "LlamaTokenizer", "legacy": True}),
    "the plain class": (byte_level, {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "GPT2Tokenizer, with a space before": (
        byte_level, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "add_bos_token": True}
    ),
}  # fmt: skip


def num_given_other_ids(model: Path, data: Path) -> tuple[int, int]:
    """Of the probe's texts, those that the model's own tokenizer.json encodes otherwise; and all."""
    probe = json.loads((data / "plan.json").read_bytes())["probe"]
    own, made = (
        Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (model, data / "tokenizer")
    )
    own.encode_special_tokens = made.encode_special_tokens = True  # control tokens stay text in shards
    pairs = zip(own.encode_batch(probe), made.encode_batch(probe), strict=True)
    return sum(first.ids != second.ids for first, second in pairs), len(probe)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_a_data_sets_tokenizer_loads_as_what_made_its_shards_and_plan_says_what_transformers_altered(
    prep: Prep, tmp_path: Path, raw: Path, kind: str
) -> None:
    make, config = KINDS[kind]
    model = save(tmp_path / "model", make(), **config, padding_side="left", model_max_length=77)
    lines, data = texts(), tmp_path / "data"
    (raw / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    planned = prep.command("plan", "--input_dir", raw, "--output_dir", data, "--model_id", model)
    assert planned.code == 0, planned.text
    num_other, num_texts = num_given_other_ids(model, data)
    assert (num_other > 0) == (config["tokenizer_class"] != "PreTrainedTokenizerFast")
    assert (f"for {num_other} of {num_texts} probe texts" in planned.text) == (num_other > 0)
    prep.make(data)
    expected = AutoTokenizer.from_pretrained(str(model))
    ids = dict(zip(lines, expected(lines)["input_ids"], strict=True))
    members = dict(prep.members(data / "shard-00000.tar"))
    made = {
        members[name.replace("token_ids.json", "text.txt")].decode(): json.loads(members[name])
        for name in members
        if name.endswith("token_ids.json")
    }
    assert made == ids
    with get_llama3_dataloader(data, 2, num_workers=0, rank=0, world_size=1) as loader:
        own = loader.tokenizer
    for found in (own, AutoTokenizer.from_pretrained(str(data / "tokenizer"))):
        assert found(lines)["input_ids"] == list(ids.values())
        assert found.batch_decode(list(ids.values())) == expected.batch_decode(list(ids.values()))
        assert found.special_tokens_map == expected.special_tokens_map
        assert (found.padding_side, found.model_max_length) == ("left", 77)


@pytest.mark.processes
def test_a_class_that_encodes_no_plain_text_is_refused(prep: Prep, tmp_path: Path, raw: Path) -> None:
    """LayoutLM's wants boxes beside its words; its tokenizer.json would give ids that it never gives."""
    vocab = {
        token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"])
    }
    model = save(
        tmp_path / "model", Tokenizer(models.WordPiece(vocab, unk_token="[UNK]")),
        tokenizer_class="LayoutLMv2Tokenizer", unk_token="[UNK]", bos_token=None, eos_token=None,
    )  # fmt: skip
    (raw / "a.txt").write_text("a\n")
    flags = ("--input_dir", raw, "--output_dir", tmp_path / "data", "--model_id", model)
    planned = prep.command("plan", *flags)
    assert (planned.code, "LayoutLMv2Tokenizer" in planned.text) == (2, True), planned.text


def words(unknown: str, pattern: str) -> Tokenizer:
    vocab = {token: number for number, token in enumerate([*CONTROL_TOKENS, "hello"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    return tokenizer


FAILING = {
    "it raises for a word": words("[UNK]", " "),
    "its pattern gives up on the probe, in a panic of Rust": words("<unk>", "(a|aa)+$"),
    "its pattern gives up on a document": words("<unk>", "(z|zz)+$"),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_tokenizer_that_fails_on_a_text_ends_plan_by_an_error_that_names_it(
    prep: Prep, tmp_path: Path, raw: Path, kind: str
) -> None:
    model = save(tmp_path / "model", FAILING[kind], tokenizer_class="PreTrainedTokenizerFast")
    (raw / "a.txt").write_text("hello " + "z" * 300 + "!\n")
    data = tmp_path / "data"
    planned = prep.command("plan", "--input_dir", raw, "--output_dir", data, "--model_id", model)
    assert planned.code == 65, planned.text
    assert f"the tokenizer of {model} cannot encode" in planned.text
    assert not (data / "plan.json").exists()


@pytest.mark.parametrize("damaged", ["", "[]", '{"model": {', '{"added_tokens": [1], "model": {}}'])
def test_a_damaged_tokenizer_json_ends_peek_by_an_error_that_names_it_and_report_goes_on(
    made_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    data = Path(shutil.copytree(made_dir, tmp_path / "data"))
    (data / "tokenizer" / "tokenizer.json").write_text(damaged)
    assert main(["report", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shards"]["num_done"] > 0
    assert main(["peek", str(data)]) == 74
    assert str(data / "tokenizer" / "tokenizer.json") in capsys.readouterr().err
