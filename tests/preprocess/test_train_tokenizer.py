"""A trained tokenizer is Llama 3's but for its vocabulary, and training it survives any input."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import zstandard
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.checkout import SHARED
from tests.children import environ_of_children, run_child, shardprep
from tests.input_writers import table_bytes
from tests.world import Ended, World

VOCAB_SIZE = 400
SAMPLES = [
    "The first bus leaves at 6:05, doesn't it?  I'd rather walk 12345 steps!",
    "비가 오는 날에는 도서관 2층 창가 자리가 제일 좋다.",
    "mixed 한글과 English, emoji 🙂🙂, tabs\tand\n\n  new lines  \r\n",
    " leading and trailing ",
    "",
    "<|end_of_text|> inside a text",
    "ﬁ ligature, é composed, é decomposed, ㄱㄴㄷ, 漢字かな, ١٢٣",
]


def train(raw: Path, out: Path, vocab_size: int = 300, **options: Any) -> Ended:
    world = World(out.parent, raw_dir=raw)
    return world.main("train_tokenizer", input_dir=raw, output_dir=out, vocab_size=vocab_size, **options)


def trained(raw: Path, out: Path, vocab_size: int = 300, **options: Any) -> bytes:
    """Train, which has to end well; returns tokenizer.json."""
    train(raw, out, vocab_size, **options).ends(0)
    return (out / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """About 200 KB of Korean and English lines, and a tokenizer that is trained of them."""
    root, rng = tmp_path_factory.mktemp("trained"), random.Random(7)
    english = "the old bridge carries nobody home before winter because its keeper doesn't trust snow"
    korean = "오래된 다리는 겨울이 오기 전에 아무도 집으로 데려다주지 않는다 눈을 믿지 못하는 관리인"
    world = World(root, tokenizer=root / "to" / "tokenizer")
    for name, words in (("en.txt", english), ("ko.txt", korean)):
        lines = (" ".join(rng.choices(words.split(), k=rng.randrange(1, 30))) + "." for _ in range(1500))
        world.raw({name: "\n".join(lines)})
    trained(world.raw_dir, world.tokenizer, VOCAB_SIZE)
    return world


def test_a_trained_tokenizer_has_ids_without_holes_and_gives_any_text_back(world: World) -> None:
    names = ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in world.tokenizer.iterdir()) == names
    assert [path.name for path in world.tokenizer.parent.iterdir()] == ["tokenizer"]
    tokenizer = Tokenizer.from_file(str(world.tokenizer / "tokenizer.json"))
    assert sorted(tokenizer.get_vocab(with_added_tokens=True).values()) == list(range(VOCAB_SIZE + 256))
    loaded = AutoTokenizer.from_pretrained(str(world.tokenizer))
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.encode(text).ids == loaded.encode(text) == [VOCAB_SIZE, *ids], "BOS, and no EOS"
    text = (world.raw_dir / "ko.txt").read_text(encoding="utf-8")
    assert len(tokenizer.encode(text).ids) * 4 < len(text.encode())
    assert loaded.is_fast
    special = (loaded.bos_token, loaded.eos_token, loaded.pad_token, loaded.pad_token_id)
    assert special == ("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", VOCAB_SIZE + 4)


@pytest.mark.slow
def test_pipeline_and_special_tokens_are_those_of_llama_3(world: World) -> None:
    path = SHARED / "tokenizers" / "llama3" / "tokenizer.json"
    if not path.exists():
        pytest.skip(f"Llama 3's tokenizer is not at {path}; SHARDPREP_TEST_SHARED may name its folder")
    theirs = json.loads(path.read_text(encoding="utf-8"))
    ours = json.loads((world.tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    shift = 128_000 - VOCAB_SIZE
    for token in ours["added_tokens"]:
        token["id"] += shift
    ours["post_processor"]["processors"][1]["special_tokens"]["<|begin_of_text|>"]["ids"][0] += shift
    for part in (theirs, ours):
        del part["model"]["vocab"], part["model"]["merges"]
    assert ours == theirs


@pytest.mark.processes
def test_equal_inputs_give_equal_bytes_whatever_the_threads(world: World, tmp_path: Path) -> None:
    words = ["--input_dir", world.raw_dir, "--vocab_size", VOCAB_SIZE, "--output_dir", tmp_path / "again"]
    environ = environ_of_children(RAYON_NUM_THREADS="1", PYTHONHASHSEED="5")
    run_child(shardprep("train_tokenizer", *words), env=environ)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (world.tokenizer / name).read_bytes()


def test_a_small_corpus_gives_a_smaller_vocabulary_and_says_so(tmp_path: Path) -> None:
    raw = World(tmp_path).raw({"a.txt": "ab ab ab\n"}).raw_dir
    (tmp_path / "out").mkdir()  # which it fills
    train(raw, tmp_path / "out", 128_000).ends(0, "258")
    vocab = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).get_vocab()
    assert (vocab["ab"], vocab["<|begin_of_text|>"]) == (256, 258)
    assert sorted(vocab.values()) == list(range(258 + 256))


def test_records_and_lines_without_text_are_counted_by_reason_and_the_first_is_named(tmp_path: Path) -> None:
    records = '{"text": "ab ab"}\n{"other": 1}\n{"text": nul\n{"text": null}\n'
    lines = b"good good\nbad \xff\xfe bad\n" + "\ufffd is no error\n".encode()
    world = World(tmp_path).raw({"a.jsonl": records, "b.txt": lines})
    reasons = ("1 no_field", "1 bad_json", "1 null_field", "1 undecodable")
    train(world.raw_dir, tmp_path / "out").ends(0, *reasons, "a.jsonl byte 18")


@pytest.mark.slow
def test_a_sample_is_of_all_parts_of_all_files(tmp_path: Path) -> None:
    """Each tenth of the text has a word of its own, which is a token where any of it was sampled."""
    words = ["가나", "다라", "마바", "사아", "자차", "카타", "파하", "거너", "더러", "머버"]
    world, size, encoding = World(tmp_path), 0, "cp949"
    for part in range(5):
        text = "".join((f"{word} " * 12 + "\n") * 25_000 for word in words[2 * part : 2 * part + 2])
        size += len(text.encode(encoding))
        world.raw({f"{part}.txt": text.encode(encoding)})
    trained(world.raw_dir, tmp_path / "out", 330, max_bytes=size // 6, encoding=encoding)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert [len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) for word in words] == [1] * 10


ROWS: list[dict[str, Any]] = [
    {"a": {"b": f"문서 {number} 입니다"}, "c": f"line {number} of text "} for number in range(3000)
]


def test_every_format_and_a_long_document_give_what_the_same_plain_lines_give(tmp_path: Path) -> None:
    data = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)
    files: dict[str, bytes] = {
        "r.jsonl": data, "r.ndjson.zst": zstandard.compress(data),
        "r.parquet": table_bytes(ROWS, "parquet", 100),
        "r.txt": "".join(f"{row['a']['b']} / {row['c']}\n" for row in ROWS).encode(),
    }  # fmt: skip
    found = set()
    for name, content in files.items():
        world = World(tmp_path / name).raw({name: content})
        template = None if name == "r.txt" else "{a.b} / {c}"
        found.add(trained(world.raw_dir, tmp_path / name / "out", text_template=template))
    assert len(found) == 1
    long = World(tmp_path / "long").raw({"a.txt": "가나 다라마 " * 100_000})
    trained(long.raw_dir, tmp_path / "long" / "out")
    empty = World(tmp_path / "empty").raw({"a.txt": "\n \n", "b.jsonl": [{"a": "no text"}]})
    train(empty.raw_dir, tmp_path / "none").ends(65)
    assert not (tmp_path / "none").exists()
