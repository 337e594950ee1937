"""A trained tokenizer is Llama 3's but for its vocabulary, and training it survives any input."""

import argparse
import gzip
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import Tokenizer

from preprocess.look import train_tokenizer as command
from preprocess.look.train_tokenizer import (
    PIECE_CHARS,
    TrainingText,
    pieces_of_text,
    special_tokens,
    train_tokenizer,
    training_options,
)
from shardprep.errors import BadInput, CannotWrite, NotFound, Refused, UsageError
from tests.children import child, end_of, run_child
from tests.held_children import Hold
from tests.input_writers import bgzip

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


def all_lines(folder: Path, max_bytes: int, encoding: str = "utf-8") -> list[str]:
    options = training_options(encoding)
    text = TrainingText(folder, options, max_bytes)
    found = [line for batch in text for line in batch]
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
    assert [vocab[name] for name in special_tokens()] == list(range(VOCAB_SIZE, VOCAB_SIZE + 256))
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.encode(text).ids == [VOCAB_SIZE, *ids], "BOS, and no EOS"
    text = (text_dir / "ko.txt").read_text(encoding="utf-8")
    assert len(tokenizer.encode(text).ids) * 4 < len(text.encode())


@pytest.mark.slow
def test_pipeline_and_special_tokens_are_those_of_llama_3(trained_dir: Path) -> None:
    shared = Path(os.environ.get("SHARDPREP_TEST_SHARED", Path(__file__).parents[3] / "shared"))
    path = shared / "tokenizers" / "llama3" / "tokenizer.json"
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
    assert "yields 258 base tokens, not the 128,000 asked for" in capsys.readouterr().err


def test_an_existing_tokenizer_is_refused_and_left_as_it_is(trained_dir: Path, text_dir: Path) -> None:
    before = (trained_dir / "tokenizer.json").read_bytes()
    with pytest.raises(Refused, match="already holds a tokenizer"):
        train_tokenizer(input_dir=text_dir, vocab_size=300, output_dir=trained_dir)
    assert (trained_dir / "tokenizer.json").read_bytes() == before
    assert Refused.exit_code == 78


def test_a_tokenizer_that_appears_during_training_is_refused_and_left_as_it_is(
    text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_and_lose_the_race(*args: object) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "tokenizer.json").write_text("theirs")

    monkeypatch.setattr(command, "_train", train_and_lose_the_race)
    with pytest.raises(Refused, match="already holds a tokenizer"):
        train_tokenizer(input_dir=text_dir, vocab_size=300, output_dir=tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_output_folder_is_filled_if_it_is_empty_and_else_refused(text_dir: Path, tmp_path: Path) -> None:
    train_tokenizer(input_dir=text_dir, vocab_size=300, output_dir=tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "notes.md").write_text("mine")
    with pytest.raises(Refused, match=r"1 file \(notes\.md"):
        train_tokenizer(input_dir=text_dir, vocab_size=300, output_dir=tmp_path / "sub")
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


def test_undecodable_lines_are_left_out_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(b"good good\nbad \xff\xfe bad\n" + "\ufffd is no error\n".encode())
    assert all_lines(tmp_path, 10**9) == ["good good", "\ufffd is no error"]
    train_tokenizer(input_dir=tmp_path, vocab_size=300, output_dir=tmp_path / "out")
    error = capsys.readouterr().err
    assert "left out 1 document (1 undecodable; the first in " in error
    assert "a.txt" in error


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp949"])
def test_lines_are_those_of_python_text_mode_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    lines = [f"{i}번째 문서, line {i} " + "가나다" * (i % 50) for i in range(20_000)]
    (tmp_path / "a.txt").write_bytes("\r\n".join(lines).encode(encoding))
    assert all_lines(tmp_path, 10**9, encoding) == [line.strip() for line in lines]


@pytest.mark.parametrize("encoding", ["utf-8", "cp949"])
def test_a_sample_holds_whole_lines_spread_evenly_over_the_files(tmp_path: Path, encoding: str) -> None:
    num_lines = 150_000
    lines = [f"문서 {i:06d} " + "x" * (i % 40) for i in range(num_lines)]
    for part in range(3):
        chunk = lines[part * 50_000 : (part + 1) * 50_000]
        (tmp_path / f"{part}.txt").write_bytes("\n".join(chunk).encode(encoding))
    total_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    max_bytes = total_bytes // 4
    sampled = all_lines(tmp_path, max_bytes, encoding)
    assert set(sampled) <= {line.strip() for line in lines}
    assert len(set(sampled)) == len(sampled)
    assert len(sampled) > 0.95 * num_lines / 4
    tenths = [0] * 10
    for line in sampled:
        tenths[int(line.split()[1]) * 10 // num_lines] += 1
    assert max(tenths) < 1.3 * min(tenths)


def test_a_line_too_long_for_memory_is_cut_into_pieces_between_words() -> None:
    text = "단어 word " * 200_000
    pieces = list(pieces_of_text(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE_CHARS
    assert (
        set("".join(pieces).split())
        == {word for piece in pieces for word in piece.split()}
        == {"단어", "word"}
    )


def test_a_single_line_larger_than_the_sample_is_sampled_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("가나 다라마 " * 200_000, encoding="utf-8")
    sampled = all_lines(tmp_path, 1_000_000)
    assert 0.9 * 1_000_000 < sum(len(line.encode()) for line in sampled) <= 1_000_000


def test_bad_arguments_and_inputs_get_their_own_error(text_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NotFound, match="no folder"):
        train_tokenizer(input_dir=tmp_path / "nowhere", vocab_size=300, output_dir=out)
    (empty / "deep").mkdir()
    (empty / "deep" / "a.txt").write_text("here")
    with pytest.raises(NotFound, match=r"no \.txt.*--recursive"):
        train_tokenizer(input_dir=empty, vocab_size=300, output_dir=out)
    (empty / "a.txt").write_text("\n \n")
    with pytest.raises(BadInput, match="nothing to train on"):
        train_tokenizer(input_dir=empty, vocab_size=300, output_dir=out)
    with pytest.raises(UsageError, match="--vocab_size is 255"):
        train_tokenizer(input_dir=text_dir, vocab_size=255, output_dir=out)
    with pytest.raises(UsageError, match="--max_bytes is 10"):
        train_tokenizer(input_dir=text_dir, vocab_size=300, output_dir=out, max_bytes=10)
    with pytest.raises(UsageError, match="no such text encoding"):
        train_tokenizer(input_dir=text_dir, vocab_size=300, output_dir=out, encoding="utf-88")
    with pytest.raises(UsageError, match="no such text encoding"):
        train_tokenizer(input_dir=text_dir, vocab_size=300, output_dir=out, encoding="hex")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


ROWS = [{"a": {"b": f"문서 {number} 입니다"}, "c": f"line {number}\nof text "} for number in range(3000)]
TEMPLATE = "{a.b} / {c}"


def record_files(folder: Path) -> dict[str, Path]:
    """The same rows in every format, in a folder each."""
    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS]
    data = b"".join(lines)
    table = pyarrow.Table.from_pylist(ROWS)
    found = {}
    for name in ("r.jsonl", "r.json.gz", "r.ndjson.zst", "r.blocks.jsonl.gz", "r.parquet", "r.arrow"):
        found[name] = folder / name.replace(".", "_") / name
        found[name].parent.mkdir(parents=True)
    found["r.jsonl"].write_bytes(data)
    found["r.json.gz"].write_bytes(gzip.compress(data))
    found["r.ndjson.zst"].write_bytes(zstandard.ZstdCompressor().compress(data))
    found["r.blocks.jsonl.gz"].write_bytes(bgzip(data, [8000]))
    pyarrow.parquet.write_table(table, found["r.parquet"], row_group_size=100)
    with pyarrow.ipc.new_stream(str(found["r.arrow"]), table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return found


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return record_files(tmp_path_factory.mktemp("records"))


def record_texts(folder: Path, max_bytes: int = 10**9) -> list[str]:
    options = training_options("utf-8", text_template=TEMPLATE)
    text = TrainingText(folder, options, max_bytes)
    found = [line for batch in text for line in batch]
    assert text.num_bytes <= max_bytes
    return found


EXPECTED = [f"{row['a']['b']} / {row['c'].strip()}" for row in ROWS]  # type: ignore[index,attr-defined]


@pytest.mark.parametrize(
    "name", ["r.jsonl", "r.json.gz", "r.ndjson.zst", "r.blocks.jsonl.gz", "r.parquet", "r.arrow"]
)
def test_every_format_gives_its_documents_and_a_sample_gives_some_of_them_once(
    records: dict[str, Path], name: str
) -> None:
    folder = records[name].parent
    assert record_texts(folder) == EXPECTED
    limit = sum(map(len, map(str.encode, EXPECTED))) // 3
    sampled = record_texts(folder, limit)
    assert set(sampled) <= set(EXPECTED)
    assert len(set(sampled)) == len(sampled)
    assert len(sampled) > 0.5 * len(EXPECTED) / 3
    if name not in ("r.json.gz", "r.ndjson.zst"):
        last_tenth = set(EXPECTED[-300:])
        assert last_tenth & set(sampled), "a sample is of the whole file where it can be entered"


def test_the_command_trains_on_records_by_field_or_template_and_as_on_the_same_plain_text(
    records: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.txt").write_text("".join(row["a"]["b"] + "\n" for row in ROWS))  # type: ignore[index]
    flags = ["--vocab_size", "300", "--input_dir"]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for name, given in (("r.parquet", ["--text_field", "a.b"]), ("r.json.gz", ["--text_template", "{a.b}"])):
        given = [*flags, str(records[name].parent), *given, "--output_dir", str(tmp_path / name)]
        assert command.main(parser.parse_args(given)) == 0
    assert (
        command.main(
            parser.parse_args([*flags, str(tmp_path / "plain"), "--output_dir", str(tmp_path / "t")])
        )
        == 0
    )
    expected = (tmp_path / "t" / "tokenizer.json").read_bytes()
    assert (tmp_path / "r.parquet" / "tokenizer.json").read_bytes() == expected
    assert (tmp_path / "r.json.gz" / "tokenizer.json").read_bytes() == expected


def test_records_without_text_are_counted_by_reason_and_the_first_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab ab"}\n{"other": 1}\n{"text": nul\n{"text": null}\n')
    train_tokenizer(input_dir=tmp_path, vocab_size=300, output_dir=tmp_path / "out")
    said = capsys.readouterr().err
    assert "left out 3 documents (1 no_field, 1 bad_json, 1 null_field; the first in " in said
    assert "a.jsonl byte 18)" in said


def test_a_record_file_that_cannot_be_read_or_lacks_the_column_is_named(
    records: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"r\.parquet has no column text, but a, c"):
        train_tokenizer(input_dir=records["r.parquet"].parent, vocab_size=300, output_dir=tmp_path / "out")
    (tmp_path / "cut.jsonl.gz").write_bytes(records["r.json.gz"].read_bytes()[:-20])
    with pytest.raises(BadInput, match=r"cut\.jsonl\.gz is cut short"):
        train_tokenizer(input_dir=tmp_path, vocab_size=300, output_dir=tmp_path / "out", text_field="c")
    with pytest.raises(BadInput, match=r"left out 3,000 documents \(3,000 no_field.*--text_field"):
        train_tokenizer(input_dir=records["r.jsonl"].parent, vocab_size=300, output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()
