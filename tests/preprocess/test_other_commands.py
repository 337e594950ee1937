"""``peek``, ``export`` and ``train_tokenizer``.

A trained tokenizer equals Llama 3's except for its vocabulary.
"""

from __future__ import annotations

import json
import os
import random
import re
import struct
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.children import child, end_of, environ_of_children, run_child, shardprep
from tests.held_children import Hold
from tests.input_writers import table_bytes
from tests.plain_reader import plain_records
from tests.world import EOS, Ended, World, call_main, tokenizer_dir

pytestmark = pytest.mark.long

HEAD = re.compile(
    r"^shard-(\d{5}) (?:document|row) (\d+): \d+ tokens(?:, for validation)?, "
    r"(?:begins in the document at|from) .* byte \d+$"
)
_WORDS = ("the", "kettle", "sings", "and", "nobody's", "listening", "12345", "to", "도서관", "읽는다")
LINES = [
    " ".join([str(number), *random.Random(number).choices(_WORDS, k=number % 13)]) for number in range(90)
]
FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "packed": {"record": "packed", "seq_len": 64},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit"},
    "held": {"record": "packed", "seq_len": 64, "validation_fraction": 0.4},
}
EXPORTED = ["documents", "packed"]  # the order of documents in rows of best_fit is another one
EOS_ID = int(Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json")).token_to_id(EOS) or 0)
Worlds = dict[str, World]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    root = tmp_path_factory.mktemp("data")
    records = [{"id": f"web/{number}", "text": text} for number, text in enumerate(LINES)]
    worlds = {}
    for name, options in FORMS.items():
        worlds[name] = World(root, data_dir=root / name)
        worlds[name].raw({"a.jsonl": records[:40], "b.jsonl": records[40:]})
        worlds[name].plan(num_shards=3, id_field="id", **options).run()
    return worlds


def peek(world: World, *words: object) -> list[str]:
    """Return the blocks that peek prints, one per sample."""
    ended = world.main("peek", world.data_dir, *words, "--chars", 0).ends(0)
    return ended.out.rstrip("\n").split("\n\n")


def as_records(lines: list[str]) -> list[dict[str, str]]:
    return [{"text": line} for line in lines]


def head(block: str) -> tuple[int, int]:
    """Return (shard, number) of a printed sample."""
    found = HEAD.match(block.splitlines()[0])
    assert found, block
    return int(found[1]), int(found[2])


def body(block: str) -> str:
    return re.sub("⟦.*?⟧", "", "".join(line[2:] for line in block.splitlines()[1:] if line[2:5] != "---"))


def test_peek_prints_documents_unchanged_and_marks_their_begin_in_rows(worlds: Worlds) -> None:
    assert list(map(body, peek(worlds["documents"], "--num", 10**6))) == LINES
    blocks = peek(worlds["packed"], "--num", 10**6)
    assert sum(block.count("  --- a document begins") for block in blocks) == len(LINES)
    # A row may end inside a character, so only ASCII is compared.
    assert re.findall("[ -~]", "".join(map(body, blocks))) == re.findall("[ -~]", "".join(LINES))
    shown = "".join(blocks)
    assert "\ufffd" not in shown
    assert "…" in shown, "the mark of a cut character"
    for block in blocks:
        assert ("--- the rest of a document" in block) == ("begins in the document at" in block)
    assert any("the rest of a document" in block for block in blocks)
    held = worlds["held"]
    num_held = sum(manifest["counts"]["validation"]["num_samples"] for manifest in held.manifests())
    assert sum(", for validation, " in block for block in peek(held, "--num", 10**6)) == num_held > 0


@pytest.mark.parametrize("form", ["documents", "packed", "held"])  # best_fit rows have no address by byte
def test_each_address_shows_its_document(worlds: Worlds, form: str) -> None:
    """Also if its row begins in another input."""
    world = worlds[form]
    inputs = sorted(world.raw_dir.iterdir())
    places = [(path.name, record.offset) for path in inputs for record in plain_records(path)]
    every = {head(block): block for block in peek(world, "--num", 10**6)}
    for number, (name, byte) in [*enumerate(places)][::3]:
        for address in (f"id:web/{number}", f"{name}:{byte}", f"{name}:{byte + 7}"):
            found = peek(world, address)
            assert LINES[number][:6] in "".join(map(body, found)), (address, found)
            assert [every[head(block)] for block in found] == found
    (shard, sample), block = next(
        item for item in every.items() if form == "documents" or item[1].count("  --- ") > 1
    )
    assert peek(world, f"{shard}:{sample}", "--num", 1) == [block]
    title, *documents = re.split(r"^(?=  --- )", block, flags=re.MULTILINE)
    for number, document in enumerate(documents):
        assert peek(world, f"{shard}:{sample}:{number}") == [f"{title}{document}".rstrip("\n")]


def test_peek_stats_counts_documents_by_length_and_source(tmp_path: Path) -> None:
    world = World(tmp_path).raw(
        {"web/a.jsonl": as_records(LINES[:70]), "code/b.jsonl": as_records(LINES[70:])}
    )
    world.plan(num_shards=3, recursive=True, token_format="json").run()
    lengths: dict[str, list[int]] = {"web": [], "code": []}
    for shard in world.data_dir.glob("*.tar"):
        with tarfile.open(shard) as tar:
            texts = {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]
        for name, content in texts.items():
            if name.endswith(".token_ids.json"):
                text = texts[name.replace("token_ids.json", "text.txt")].decode()
                source = "web" if int(text.split()[0]) < 70 else "code"
                lengths[source].append(len(json.loads(content)))
    told = json.loads(world.main("peek", world.data_dir, "--stats", "--json").ends(0).out)
    for source in told["sources"]:
        expected = lengths[source["name"]]
        assert (source["num_documents"], source["num_tokens"]) == (len(expected), sum(expected))
        for low, num in source["num_of_length"].items():
            assert num == sum(int(low) <= length < 2 * int(low) for length in expected)
    printed = world.main("peek", world.data_dir, "--stats").ends(0).out.splitlines()
    assert max(map(len, printed)) <= 80
    assert sum(line.count("#") == 30 for line in printed) == 2, "the longest bar of each source"
    world.main("peek", world.data_dir, "0:1", "--stats").ends(2, "0:1")


def test_peek_json_has_what_peek_prints(worlds: Worlds) -> None:
    world = worlds["packed"]
    blocks = peek(world, "--num", 10**6)
    printed = world.main("peek", world.data_dir, "--json", "--num", 10**6).ends(0).out.splitlines()
    samples = [json.loads(line) for line in printed]
    assert [(each["shard"], each["sample"]) for each in samples] == list(map(head, blocks))
    told = ["".join(re.sub("⟦.*?⟧", "", text) for text in each["documents"]) for each in samples]
    assert [text.replace("\ufffd", "…") for text in told] == list(map(body, blocks))


def test_peek_grep_shows_the_samples_that_match(worlds: Worlds) -> None:
    found = peek(worlds["documents"], "--grep", "kettle [a-z]", "--num", 10**6)
    assert [body(block) for block in found] == [line for line in LINES if re.search("kettle [a-z]", line)]
    for words, code in ((["id:nobody"], 66), (["0:1:1"], 66), (["--grep", "none"], 66), (["id:"], 2)):
        assert worlds["documents"].main("peek", worlds["documents"].data_dir, *words).code == code, words


def samples_of(world: World) -> list[list[int]]:
    """Return the documents, or rows without padding, from the loader."""
    return [sample["input_ids"] for sample in world.samples()]


def stream_of(world: World) -> list[int]:
    """Return all ids in order, with EOS after each document."""
    put = [] if FORMS.get(world.data_dir.name) else [EOS_ID]  # rows already have EOS
    return list(chain(*(sample + put for sample in samples_of(world))))


def export(world: World, to: str, out: Path, *flags: object) -> Ended:
    return call_main("export", world.data_dir, "--to", to, "--output_dir", out, *flags)


def exported(world: World, to: str, out: Path, *flags: object) -> Path:
    export(world, to, out, *flags).ends(0)
    return out


def files(folder: Path) -> dict[str, bytes]:
    """Return the files of an export, except its settings and the list of paths."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return {name: found[name] for name in found if name not in ("export.json", "data_args.txt")}


def megatron_sequences(out: Path, shard_id: int) -> list[list[int]]:
    """Read a shard in the format that megatron-core documents."""
    raw = (out / f"shard-{shard_id:05d}_document.idx").read_bytes()
    magic, version, code, num_sequences, num_documents = struct.unpack_from("<9sQBQQ", raw)
    assert (magic, version, code) == (b"MMIDIDX\x00\x00", 1, 8)
    assert num_documents == num_sequences + 1
    lengths = np.frombuffer(raw, "<i4", num_sequences, 34)
    offsets = np.frombuffer(raw, "<i8", num_sequences, 34 + lengths.nbytes)
    documents = np.frombuffer(raw, "<i8", num_documents, 34 + lengths.nbytes + offsets.nbytes)
    assert documents.tolist() == list(range(num_documents))
    ids = (out / f"shard-{shard_id:05d}_document.bin").read_bytes()
    assert len(ids) == 2 * int(lengths.sum())
    return [np.frombuffer(ids, "<u2", n, at).tolist() for n, at in zip(lengths, offsets, strict=True)]


@pytest.mark.parametrize("name", EXPORTED)
def test_megatron_has_documents_and_nanogpt_their_stream(worlds: Worlds, tmp_path: Path, name: str) -> None:
    out, stream = exported(worlds[name], "megatron", tmp_path / "out"), stream_of(worlds[name])
    sequences = list(chain(*(megatron_sequences(out, shard_id) for shard_id in range(3))))
    assert list(chain(*sequences)) == stream
    assert {sequence[-1] for sequence in sequences} == {EOS_ID}
    assert all(EOS_ID not in sequence[:-1] for sequence in sequences)
    sizes = (out / "data_args.txt").read_text().split()[::2]
    assert sum(map(int, sizes)) == len(stream)
    out = exported(worlds[name], "nanogpt", tmp_path / "of nanogpt")
    assert np.fromfile(out / "train.bin", np.uint16).tolist() == stream
    assert sorted(path.name for path in out.iterdir()) == ["export.json", "train.bin", "written.jsonl"]


@pytest.mark.parametrize(("seq_len", "side"), [(8, None), (16, "train"), (16, "validation"), (64, None)])
def test_documents_that_best_fit_cut_are_whole_in_streams(
    tmp_path: Path, seq_len: int, side: str | None
) -> None:
    """Also if their pieces lie far apart, among the pieces of others, and fill several rows exactly."""
    rng = random.Random(seq_len)
    # The ids of a document are those of its letters, BOS before and EOS after them.
    sizes = [seq_len * rng.randint(1, 4) - 2 + rng.choice([0, 0, 1, 5 - seq_len]) for _ in range(150)]
    texts = ["".join(rng.choices("xyzXYZ", k=max(1, size))) for size in sizes]
    options = {"record": "packed", "seq_len": seq_len, "pack": "best_fit", "validation_fraction": 0.3}
    world = World(tmp_path).raw({"a.txt": "\n".join(texts)}).make(num_shards=2, **options)
    whole = World(tmp_path / "whole", raw_dir=world.raw_dir)
    whole.make(num_shards=2, validation_fraction=0.3, append_eos=True)
    rows = [sample["input_ids"] for sample in world.samples(split=side)]
    assert sum(len(row) == seq_len and EOS_ID not in row for row in rows) > 9, "documents are cut"
    expected = sorted(sample["input_ids"] for sample in whole.samples(split=side))
    flags = ["--split", side] if side else []
    out = exported(world, "megatron", tmp_path / "out", *flags)
    sequences = list(chain(*(megatron_sequences(out, shard_id) for shard_id in range(2))))
    assert sorted(sequences) == expected
    out = exported(world, "nanogpt", tmp_path / "of nanogpt", *flags)
    assert np.fromfile(out / "train.bin", np.uint16).tolist() == list(chain(*sequences))


@pytest.mark.slow
def test_a_document_larger_than_one_read_is_exported_whole(tmp_path: Path) -> None:
    text = " ".join(map(str, range(150_000)))
    world = World(tmp_path).raw({"a.txt": f"short\n{text}\nshort\n"})
    out = exported(world.plan(num_shards=1).run(), "nanogpt", tmp_path / "out")
    assert (world.data_dir / "shard-00000.tar").stat().st_size > 4 << 20
    assert np.fromfile(out / "train.bin", np.uint16).tolist() == stream_of(world)


@pytest.mark.parametrize("flags", [[], ["--put_eos"]])
@pytest.mark.parametrize("name", ["documents", "packed"])
def test_arrow_files_have_all_samples(worlds: Worlds, tmp_path: Path, name: str, flags: list[str]) -> None:
    out = exported(worlds[name], "hf", tmp_path / "out", *flags)
    tables = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in sorted(out.glob("*.arrow"))]
    put = [EOS_ID] if flags and name == "documents" else []
    rows = [row + put for row in samples_of(worlds[name])]
    assert list(chain(*(table["input_ids"].to_pylist() for table in tables))) == rows
    assert len(json.loads((out / "state.json").read_text())["_data_files"]) == 3


@pytest.mark.frameworks
def test_datasets_and_megatron_core_read_the_exports(worlds: Worlds, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    out = exported(worlds["packed"], "hf", tmp_path / "hf")
    assert datasets.load_from_disk(str(out))["input_ids"][:] == samples_of(worlds["packed"])
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    out = exported(worlds["documents"], "megatron", tmp_path / "megatron")
    found = [indexed.IndexedDataset(str(out / f"shard-{shard_id:05d}_document")) for shard_id in range(3)]
    ids = chain(*(each[number].tolist() for each in found for number in range(len(each))))
    assert list(ids) == stream_of(worlds["documents"])


@pytest.mark.parametrize(
    ("to", "name"),
    [
        ("megatron", "shard-00001_document.idx"),
        ("megatron", "shard-00001_document.bin"),
        ("hf", "data-00001-of-00003.arrow"),
        ("nanogpt", "train.bin"),
    ],
)
def test_an_export_writes_a_file_again_that_was_cut_or_altered(
    worlds: Worlds, tmp_path: Path, to: str, name: str
) -> None:
    """But no files of other shards."""
    out = exported(worlds["packed"], to, tmp_path / "out")
    whole = (out / name).read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    other = out / name.replace("00001", "00000")
    inode = other.stat().st_ino
    for content in (b"", whole[:middle], flipped):
        (out / name).write_bytes(content)
        exported(worlds["packed"], to, out)
        assert (out / name).read_bytes() == whole
    assert (other.stat().st_ino == inode) == (other.name != name)


def test_an_export_needs_no_record_that_a_power_loss_cut(worlds: Worlds, tmp_path: Path) -> None:
    out = exported(worlds["packed"], "megatron", tmp_path / "out")
    before = files(out)
    record = out / "written.jsonl"
    for content in (b"", record.read_bytes()[:-30], b"{}\n[\n\xff\n"):
        record.write_bytes(content)
        exported(worlds["packed"], "megatron", out)
        record.unlink()
        assert files(out) == {name: content for name, content in before.items() if name != record.name}
        exported(worlds["packed"], "megatron", out)
        assert files(out) == before


def test_an_export_to_one_stream_writes_its_parts_again_that_were_cut(worlds: Worlds, tmp_path: Path) -> None:
    out = exported(worlds["packed"], "nanogpt", tmp_path / "out")
    whole = (out / "train.bin").read_bytes()
    (out / "train.bin").unlink()
    (out / "shard-00001.bin.partial").touch()
    exported(worlds["packed"], "nanogpt", out)
    assert (out / "train.bin").read_bytes() == whole


def test_two_equal_exports_at_the_same_time_both_succeed(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, out = os.link, tmp_path / "out"

    def link_after_another_export(*names: str, **folders: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        exported(worlds["packed"], "nanogpt", out)  # it removes all temporary files
        link(*names, **folders)

    monkeypatch.setattr(os, "link", link_after_another_export)
    exported(worlds["packed"], "nanogpt", out)


def test_an_export_into_the_folder_of_another_export_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    data, out = worlds["documents"], exported(worlds["documents"], "nanogpt", tmp_path / "out")
    before = files(out)
    assert export(data, "megatron", out).code == 78
    assert export(data, "nanogpt", out, "--no-put_eos").code == 78
    for content in ("", "[]", "3", '{"to": 3}', "[" * 10**5, "\0"):
        (out / "export.json").write_text(content)
        assert export(data, "nanogpt", out).code == 78, content
    assert files(out) == before


def test_the_sides_of_a_split_are_exported_to_folders_of_their_own(worlds: Worlds, tmp_path: Path) -> None:
    for side in ("train", "validation"):
        exported(worlds["held"], "nanogpt", tmp_path / side, "--split", side)
    assert export(worlds["held"], "nanogpt", tmp_path / "train").code == 78
    exported(worlds["held"], "nanogpt", tmp_path / "both")
    sizes = [(tmp_path / name / "train.bin").stat().st_size for name in ("train", "validation", "both")]
    assert sizes[0] + sizes[1] == sizes[2] > max(sizes[:2])


# train_tokenizer.

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
    """Train a tokenizer and return the bytes of tokenizer.json."""
    train(raw, out, vocab_size, **options).ends(0)
    return (out / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """About 200 KB of Korean and English lines, and a tokenizer trained on them."""
    root, rng = tmp_path_factory.mktemp("trained"), random.Random(7)
    english = "the old bridge carries nobody home before winter because its keeper doesn't trust snow"
    korean = "오래된 다리는 겨울이 오기 전에 아무도 집으로 데려다주지 않는다 눈을 믿지 못하는 관리인"
    world = World(root, tokenizer=root / "to" / "tokenizer")
    for name, words in (("en.txt", english), ("ko.txt", korean)):
        lines = (" ".join(rng.choices(words.split(), k=rng.randrange(1, 30))) + "." for _ in range(1500))
        world.raw({name: "\n".join(lines)})
    trained(world.raw_dir, world.tokenizer, VOCAB_SIZE)
    return world


def test_a_trained_tokenizer_has_contiguous_ids_and_round_trips_any_text(world: World) -> None:
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
def test_pipeline_and_special_tokens_equal_those_of_llama_3(world: World, shared_dir: Path) -> None:
    theirs = json.loads((shared_dir / "tokenizers" / "llama3" / "tokenizer.json").read_bytes())
    ours = json.loads((world.tokenizer / "tokenizer.json").read_bytes())
    shift = 128_000 - VOCAB_SIZE
    for token in ours["added_tokens"]:
        token["id"] += shift
    ours["post_processor"]["processors"][1]["special_tokens"]["<|begin_of_text|>"]["ids"][0] += shift
    for part in (theirs, ours):
        del part["model"]["vocab"], part["model"]["merges"]
    assert ours == theirs


@pytest.mark.processes
def test_a_trained_tokenizer_does_not_depend_on_threads_or_hash_seed(world: World, tmp_path: Path) -> None:
    words = ["--input_dir", world.raw_dir, "--vocab_size", VOCAB_SIZE, "--output_dir", tmp_path / "again"]
    environ = environ_of_children(RAYON_NUM_THREADS="1", PYTHONHASHSEED="5")
    run_child(shardprep("train_tokenizer", *words), env=environ)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (world.tokenizer / name).read_bytes()


def test_a_small_corpus_gives_a_smaller_vocabulary_which_is_reported(tmp_path: Path) -> None:
    raw = World(tmp_path).raw({"a.txt": "ab ab ab\n"}).raw_dir
    (tmp_path / "out").mkdir()  # an empty folder is accepted
    train(raw, tmp_path / "out", 128_000).ends(0, "258")
    vocab = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).get_vocab()
    assert (vocab["ab"], vocab["<|begin_of_text|>"]) == (256, 258)
    assert sorted(vocab.values()) == list(range(258 + 256))


def test_train_tokenizer_counts_unusable_records_by_reason_and_names_the_first(tmp_path: Path) -> None:
    records = '{"text": "ab ab"}\n{"other": 1}\n{"text": nul\n{"text": null}\n'
    lines = b"good good\nbad \xff\xfe bad\n" + "\ufffd is no error\n".encode()
    world = World(tmp_path).raw({"a.jsonl": records, "b.txt": lines})
    reasons = ("1 no_field", "1 bad_json", "1 null_field", "1 undecodable")
    train(world.raw_dir, tmp_path / "out").ends(0, *reasons, "a.jsonl byte 18")


@pytest.mark.slow
def test_train_tokenizer_samples_all_parts_of_all_files(tmp_path: Path) -> None:
    """Each tenth of the text has its own word, which becomes a token if any of that part was sampled."""
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


def test_all_formats_train_the_same_tokenizer_as_plain_lines(tmp_path: Path) -> None:
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


# The words of a command, and the file that one attempt has written and not renamed when another one ends.
REMOVED = {
    "export megatron": ("export DATA --to megatron --output_dir OUT", "data_args.txt"),
    "export hf": ("export DATA --to hf --output_dir OUT", "dataset_info.json"),
    "export nanogpt": ("export DATA --to nanogpt --output_dir OUT", "train.bin"),
    "blank": ("blank DATA --ids LISTED --output_dir OUT --num_proc 1", "shard-00002.json"),
}


@pytest.mark.processes
@pytest.mark.parametrize("command", REMOVED)
def test_a_command_goes_on_if_an_attempt_that_is_done_removes_its_temporary_files(
    worlds: Worlds, tmp_path: Path, command: str
) -> None:
    (tmp_path / "listed").write_text("web/1\n")
    given = {"DATA": worlds["documents"].data_dir, "OUT": tmp_path / "out", "LISTED": tmp_path / "listed"}
    line, name = REMOVED[command]
    words = [given.get(word, word) for word in line.split()]
    hold = Hold(tmp_path, "fsync", rf"/\.{name}\..*\.tmp$")
    with child(shardprep(*words), env=environ_of_children(**hold.environ())) as slower:
        hold.wait(1, slower)
        call_main(*words).ends(0)
        assert not list((tmp_path / "out").glob(f".{name}.*"))
        hold.release()
        end_of(slower, code=0)
    call_main(*words).ends(0)
