"""A trained tokenizer is Llama 3's but for its vocabulary, and training it survives any input."""

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import Tokenizer

from preprocess.look.train_tokenizer import PIECE_CHARS, TrainingText, train_tokenizer
from shardprep.__main__ import main
from shardprep.errors import BadInput, CannotWrite, NotFound, Refused, ShardprepError, UsageError
from shardprep.format.options import PlanOptions
from tests.checkout import SHARED
from tests.children import child, end_of, run_child
from tests.held_children import Hold

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


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 200 KB of Korean and English lines."""
    folder = tmp_path_factory.mktemp("raw")
    rng = random.Random(7)
    english = "the old bridge carries nobody home before winter because its keeper doesn't trust snow"
    korean = "오래된 다리는 겨울이 오기 전에 아무도 집으로 데려다주지 않는다 눈을 믿지 못하는 관리인"
    for name, words in (("en.txt", english), ("ko.txt", korean)):
        lines = (" ".join(rng.choices(words.split(), k=rng.randrange(1, 30))) + "." for _ in range(1500))
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained_dir(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    train_tokenizer(input_dir=text_dir, vocab_size=VOCAB_SIZE, output_dir=folder)
    return folder


def all_texts(folder: Path, max_bytes: int = 10**9, **options: object) -> list[str]:
    text = TrainingText(folder, PlanOptions(**options), max_bytes)  # type: ignore[arg-type]
    found = [one for texts in text for one in texts]
    assert text.num_bytes <= max_bytes
    return found


def test_a_trained_tokenizer_has_ids_without_holes_and_gives_any_text_back(
    trained_dir: Path, text_dir: Path
) -> None:
    assert sorted(path.name for path in trained_dir.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert [path.name for path in trained_dir.parent.iterdir()] == ["tokenizer"]
    tokenizer = Tokenizer.from_file(str(trained_dir / "tokenizer.json"))
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    assert sorted(vocab.values()) == list(range(VOCAB_SIZE + 256))
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.encode(text).ids == [VOCAB_SIZE, *ids], "BOS, and no EOS"
    text = (text_dir / "ko.txt").read_text(encoding="utf-8")
    assert len(tokenizer.encode(text).ids) * 4 < len(text.encode())


@pytest.mark.slow
def test_pipeline_and_special_tokens_are_those_of_llama_3(trained_dir: Path) -> None:
    path = SHARED / "tokenizers" / "llama3" / "tokenizer.json"
    if not path.exists():
        pytest.skip(f"Llama 3's tokenizer is not at {path}; SHARDPREP_TEST_SHARED may name its folder")
    theirs = json.loads(path.read_text(encoding="utf-8"))
    ours = json.loads((trained_dir / "tokenizer.json").read_text(encoding="utf-8"))
    shift = 128_000 - VOCAB_SIZE
    for token in ours["added_tokens"]:
        token["id"] += shift
    ours["post_processor"]["processors"][1]["special_tokens"]["<|begin_of_text|>"]["ids"][0] += shift
    for part in (theirs, ours):
        del part["model"]["vocab"], part["model"]["merges"]
    assert ours == theirs


def test_autotokenizer_loads_it_as_fast_with_bos_eos_and_a_pad_of_its_own(trained_dir: Path) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(str(trained_dir))
    assert loaded.is_fast
    assert (loaded.bos_token, loaded.eos_token) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert loaded.pad_token == "<|finetune_right_pad_id|>"
    assert loaded.pad_token_id == VOCAB_SIZE + 4
    assert len({loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id}) == 3
    reference = Tokenizer.from_file(str(trained_dir / "tokenizer.json"))
    for text in SAMPLES:
        assert loaded.encode(text) == reference.encode(text).ids


@pytest.mark.processes
def test_equal_inputs_give_equal_bytes_whatever_the_threads(
    trained_dir: Path, text_dir: Path, tmp_path: Path
) -> None:
    script = (
        "import sys; from pathlib import Path;"
        "from preprocess.look.train_tokenizer import train_tokenizer as t;"
        f"t(input_dir=Path(sys.argv[1]), vocab_size={VOCAB_SIZE}, output_dir=Path(sys.argv[2]))"
    )
    copied = tmp_path / "elsewhere"
    shutil.copytree(text_dir, copied)
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "5"}
    run_child([sys.executable, "-c", script, copied, tmp_path / "again"], env=environment)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (trained_dir / name).read_bytes()


def test_a_small_corpus_gives_a_smaller_vocabulary_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("ab ab ab\n")
    train_tokenizer(input_dir=tmp_path, vocab_size=128_000, output_dir=tmp_path / "out")
    vocab = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).get_vocab()
    assert vocab["ab"] == 256
    assert vocab["<|begin_of_text|>"] == 258
    assert sorted(vocab.values()) == list(range(258 + 256))
    assert "258 base tokens" in capsys.readouterr().err


def test_an_output_folder_is_filled_if_it_is_empty_and_else_refused_and_left_as_it_is(
    text_dir: Path, tmp_path: Path
) -> None:
    train_tokenizer(input_dir=text_dir, vocab_size=300, output_dir=tmp_path)
    before = (tmp_path / "tokenizer.json").read_bytes()
    with pytest.raises(Refused):
        train_tokenizer(input_dir=text_dir, vocab_size=310, output_dir=tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    for folder in (tmp_path / "tokenizer.json", tmp_path / "tokenizer.json" / "below"):
        with pytest.raises(CannotWrite):
            train_tokenizer(input_dir=text_dir, vocab_size=300, output_dir=folder)


@pytest.mark.processes
@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_leaves_nothing_that_counts(tmp_path: Path, stop_signal: signal.Signals) -> None:
    """It is stopped when its files are written and none is synced."""
    raw, out = tmp_path / "raw", tmp_path / "to" / "out"
    raw.mkdir()
    out.parent.mkdir()
    (raw / "a.txt").write_text("ab ab ab\n")
    hold = Hold(tmp_path, "fsync", r"/\.out\.")
    flags = ("--input_dir", raw, "--output_dir", out, "--vocab_size", 600)
    with child([sys.executable, "-m", "preprocess", "train_tokenizer", *map(str, flags)],
               env={**os.environ, **hold.environ()}) as process:  # fmt: skip
        hold.wait(1, process)
        process.send_signal(stop_signal)
        end_of(process, code=75 if stop_signal == signal.SIGINT else -signal.SIGKILL)
    assert not out.exists()
    assert len(list(out.parent.iterdir())) == (stop_signal == signal.SIGKILL)


def test_records_and_lines_without_text_are_counted_by_reason_and_the_first_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab ab"}\n{"other": 1}\n{"text": nul\n{"text": null}\n')
    (tmp_path / "b.txt").write_bytes(b"good good\nbad \xff\xfe bad\n" + "\ufffd is no error\n".encode())
    train_tokenizer(input_dir=tmp_path, vocab_size=300, output_dir=tmp_path / "out")
    said = capsys.readouterr().err
    assert "left out 4 documents" in said
    for reason in ("1 no_field", "1 bad_json", "1 null_field", "1 undecodable", "a.jsonl byte 18"):
        assert reason in said
    assert all_texts(tmp_path) == ["ab ab", "good good", "\ufffd is no error"]


@pytest.mark.parametrize("encoding", ["utf-8", "cp949"])
def test_a_sample_holds_whole_lines_spread_evenly_over_the_files(tmp_path: Path, encoding: str) -> None:
    num_lines = 150_000
    lines = [f"문서 {i:06d} " + "x" * (i % 40) for i in range(num_lines)]
    for part in range(3):
        chunk = lines[part * 50_000 : (part + 1) * 50_000]
        (tmp_path / f"{part}.txt").write_bytes("\n".join(chunk).encode(encoding))
    total_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    max_bytes = total_bytes // 4
    sampled = all_texts(tmp_path, max_bytes, encoding=encoding)
    assert set(sampled) <= {line.strip() for line in lines}
    assert len(set(sampled)) == len(sampled)
    assert len(sampled) > 0.95 * num_lines / 4
    tenths = [0] * 10
    for line in sampled:
        tenths[int(line.split()[1]) * 10 // num_lines] += 1
    assert max(tenths) < 1.3 * min(tenths)


def test_a_long_document_is_taken_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("가나 다라마 " * 100_000, encoding="utf-8")
    sampled = all_texts(tmp_path, 1_000_000)
    assert 0.9 * 1_000_000 < sum(len(piece.encode()) for piece in sampled) <= 1_000_000
    assert max(map(len, sampled)) <= PIECE_CHARS
    assert "".join(sampled).replace(" ", "").startswith("가나다라마" * 900)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"input_dir": "nowhere"}, NotFound),
        ({"input_dir": "empty"}, NotFound),  # its subfolder has a file
        ({"input_dir": "blank"}, BadInput),
        ({"vocab_size": 255}, UsageError),
        ({"max_bytes": 10}, UsageError),
        ({"encoding": "utf-88"}, UsageError),
        ({"text_field": "a", "text_template": "{a}"}, UsageError),
        ({"input_dir": "table"}, BadInput),  # which has no column text
        ({"input_dir": "cut"}, BadInput),
    ],
)
def test_bad_arguments_and_inputs_get_their_own_error_and_leave_nothing(
    text_dir: Path, tmp_path: Path, given: dict[str, object], error: type[ShardprepError]
) -> None:
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    (tmp_path / "empty" / "deep" / "a.txt").write_text("here")
    for name in ("blank", "table", "cut"):
        (tmp_path / name).mkdir()
    (tmp_path / "blank" / "a.txt").write_text("\n \n")
    pyarrow.parquet.write_table(pyarrow.table({"a": ["b"]}), tmp_path / "table" / "a.parquet")
    packed = zstandard.ZstdCompressor().compress(b'{"text": "a"}\n' * 100)
    (tmp_path / "cut" / "a.jsonl.zst").write_bytes(packed[:-5])
    given = {"input_dir": text_dir, "vocab_size": 300, **given}
    given["input_dir"] = tmp_path / given["input_dir"]  # type: ignore[operator]
    with pytest.raises(error):
        train_tokenizer(output_dir=tmp_path / "out", **given)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blank", "cut", "empty", "table"]


ROWS = [{"a": {"b": f"문서 {number} 입니다"}, "c": f"line {number}\nof text "} for number in range(3000)]
EXPECTED = [f"{row['a']['b']} / {row['c'].strip()}" for row in ROWS]  # type: ignore[index,attr-defined]


@pytest.mark.parametrize("name", ["r.jsonl", "r.ndjson.zst", "r.parquet"])
def test_every_format_gives_its_documents_and_a_sample_gives_some_of_them_once(
    tmp_path: Path, name: str
) -> None:
    data = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / name, row_group_size=100)
    else:
        packed = zstandard.ZstdCompressor().compress(data)
        (tmp_path / name).write_bytes(packed if name.endswith("zst") else data)
    template: dict[str, Any] = {"text_template": "{a.b} / {c}"}
    assert all_texts(tmp_path, **template) == EXPECTED
    sampled = all_texts(tmp_path, sum(map(len, map(str.encode, EXPECTED))) // 3, **template)
    assert set(sampled) <= set(EXPECTED)
    assert len(set(sampled)) == len(sampled)
    assert len(sampled) > 0.5 * len(EXPECTED) / 3
    if not name.endswith("zst"):
        assert set(EXPECTED[-300:]) & set(sampled), "a sample is of the whole file where it can be entered"


def test_the_command_trains_on_records_as_on_the_same_plain_text(tmp_path: Path) -> None:
    for name in ("plain", "records"):
        (tmp_path / name).mkdir()
    texts = [str(row["a"]["b"]) for row in ROWS]  # type: ignore[index]
    (tmp_path / "plain" / "a.txt").write_text("\n".join(texts))
    (tmp_path / "records" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found = []
    for name, flags in (("plain", []), ("records", ["--text_field", "a.b"])):
        out = tmp_path / f"{name}.out"
        folders = ["--input_dir", str(tmp_path / name), "--output_dir", str(out)]
        assert main(["train_tokenizer", *folders, "--vocab_size", "300", *flags]) == 0
        found.append((out / "tokenizer.json").read_bytes())
    assert found[0] == found[1]
