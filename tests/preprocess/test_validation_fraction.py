"""--validation_fraction: which documents are held out follows from their content alone.

The reader here shares no code with the product.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from loader import get_llama3_dataloader
from preprocess.look.train_tokenizer import train_tokenizer
from shardprep.errors import UsageError
from tests.chat_sets import PLAIN, chat_model, conversations, write_chats
from tests.held_children import Hold

if TYPE_CHECKING:
    from tests.conftest import Prep

FRACTION = 0.2
TEXTS = [
    f"document {number}: {' '.join(['the kettle sings'] * (number % 23))}".strip() for number in range(300)
]
CHATS = conversations(150)
RECORDS: dict[str, dict[str, Any]] = {
    "documents": {"append_eos": True, "token_format": "npy"},
    "packed": {"record": "packed", "seq_len": 32},
    "best_fit": {"record": "packed", "seq_len": 32, "pack": "best_fit"},
    "chat": {"record": "chat", "seq_len": 64},
}


@pytest.fixture(scope="module")
def raws(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Texts, and conversations, each third of which stands a second time, in another form."""
    folder = tmp_path_factory.mktemp("raw")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    (folder / "text" / "b.txt").write_text("".join(f"  {text}\n\n" for text in TEXTS[::3]), encoding="utf-8")
    write_chats(folder / "chat", CHATS)
    turned = [
        {"messages": [{"name": None, **dict(reversed(turn.items()))} for turn in chat]} for chat in CHATS[::3]
    ]
    (folder / "chat" / "again.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in turned))
    return {"chat": folder / "chat", "text": folder / "text"}


@pytest.fixture(scope="module")
def models(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three tokenizers with a chat template each."""
    folder, found = tmp_path_factory.mktemp("models"), [prep.model_dir]
    for vocab_size in (300, 900):
        train_tokenizer(input_dir=sample_dir, vocab_size=vocab_size, output_dir=folder / f"own_{vocab_size}")
        found.append(folder / f"own_{vocab_size}")
    return [chat_model(model, folder / str(number), PLAIN) for number, model in enumerate(found)]


def make(prep: Prep, raws: dict[str, Path], out: Path, record: str, **options: Any) -> Path:
    raw = raws["chat" if record == "chat" else "text"]
    prep.plan(raw, out, **{"validation_fraction": FRACTION, "num_shards": 4, **RECORDS[record], **options})
    prep.make(out)
    return out


def digest_of(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def digest_of_chat(chat: list[dict[str, Any]]) -> bytes:
    return digest_of(json.dumps(chat, ensure_ascii=False, sort_keys=True, separators=(",", ":")))


def is_held(digest: bytes) -> bool:
    return Fraction(int.from_bytes(digest[:8], "big"), 1 << 64) < Fraction(FRACTION)


DIGESTS = {
    False: [digest_of(text) for text in [*TEXTS, *TEXTS[::3]]],
    True: [digest_of_chat(chat) for chat in [*CHATS[::3], *CHATS]],  # again.jsonl is the first file
}


class Side:
    """Digests and ids of one side of a data set, read from the files."""

    def __init__(self, folder: Path, *, is_validation: bool) -> None:
        self.digests: list[bytes] = []
        self.ids: list[int] = []  # of all samples, one after another
        self.counts = np.zeros(3, np.int64)
        for path in sorted(folder.glob("shard-*.json")):
            manifest = json.loads(path.read_bytes())
            counts, held = manifest["counts"], manifest["counts"]["validation"]
            raw = (folder / "digests" / f"{path.stem}.digests").read_bytes()
            assert hashlib.sha256(raw).hexdigest() == manifest["digests"]["sha256"]
            digests = [raw[place : place + 16] for place in range(0, len(raw), 16)]
            self._read(path, counts["num_samples"], held["num_samples"], is_validation)
            cut = len(digests) - held["num_documents"]
            self.digests += digests[cut:] if is_validation else digests[:cut]
            names = ("num_samples", "num_documents", "num_tokens")
            of_side = [held[name] if is_validation else counts[name] - held[name] for name in names]
            self.counts += of_side

    def _read(self, path: Path, num_samples: int, num_held: int, is_validation: bool) -> None:
        spec = json.loads(path.read_bytes())["spec"]
        size = {"documents": 28, "packed": 40, "chat": 48}[spec["record"]]
        idx, tar = path.with_suffix(".idx").read_bytes(), path.with_suffix(".tar").read_bytes()
        numbers = (
            range(num_samples - num_held, num_samples) if is_validation else range(num_samples - num_held)
        )
        for number in numbers:
            record = idx[64 + number * size :]
            offset, num_tokens = (int.from_bytes(record[a:b], "little") for a, b in ((0, 8), (12, 16)))
            self.ids += np.frombuffer(tar, "<u2", num_tokens, offset).tolist()


def sides_of(folder: Path) -> tuple[Side, Side]:
    return Side(folder, is_validation=False), Side(folder, is_validation=True)


def ids_of(model: Path, texts: list[str]) -> list[int]:
    """What the reference gives of texts, each with an EOS, one after another."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    name = json.loads((model / "tokenizer_config.json").read_text())["eos_token"]
    eos: Any = tokenizer.token_to_id(name)
    return [token for text in texts for token in [*tokenizer.encode(text).ids, eos]]


SHARDS_AND_MODELS = [(4, 0), (7, 1), (60, 2)]


@pytest.mark.processes
@pytest.mark.parametrize("record", RECORDS)
def test_the_same_documents_are_held_out_whatever_shards_tokenizer_and_record(
    prep: Prep, raws: dict[str, Path], models: list[Path], tmp_path: Path, record: str
) -> None:
    expected = DIGESTS[record == "chat"]
    assert 20 < len({digest for digest in expected if is_held(digest)}) < len(set(expected)) / 2
    for num_shards, model in SHARDS_AND_MODELS:
        out = tmp_path / str(num_shards)
        make(prep, raws, out, record, num_shards=num_shards, model_id=str(models[model]))
        train, held = sides_of(out)
        for side, is_validation in ((train, False), (held, True)):
            wanted = [digest for digest in expected if is_held(digest) == is_validation]
            assert sorted(side.digests) == sorted(wanted)
            if record != "best_fit":
                assert side.digests == wanted, "they stand in the order of the input"
            assert side.counts[1:].tolist() == [len(wanted), len(side.ids)]
        assert not set(train.digests) & set(held.digests)
        if record in ("documents", "packed"):
            every = [*TEXTS, *TEXTS[::3]]
            assert held.ids == ids_of(models[model], [text for text in every if is_held(digest_of(text))])
            assert train.ids == ids_of(
                models[model], [text for text in every if not is_held(digest_of(text))]
            )


@pytest.mark.parametrize("record", ["documents", "packed", "best_fit"])
def test_batches_change_no_byte_and_without_the_options_nothing_is_kept(
    prep: Prep, raws: dict[str, Path], tmp_path: Path, record: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preprocess.make.packing.PACKED_MEMBER_BYTES", 512)  # several members on each side
    whole = make(prep, raws, tmp_path / "whole", record)
    with monkeypatch.context() as patch:
        patch.setattr("preprocess.make.resources.WorkerSettings.batch_bytes", 700)
        small = make(prep, raws, tmp_path / "small", record)
    assert prep.contents(small) == prep.contents(whole)
    if record != "documents":
        assert len(prep.members(whole / "shard-00000.tar")) > 2 * 3 * 2
    plain = make(prep, raws, tmp_path / "plain", record, validation_fraction=0.0)
    assert not (plain / "digests").exists()
    manifests = [json.loads(path.read_bytes()) for path in plain.glob("shard-*.json")]
    assert {(data["digests"], data["counts"]["validation"]) for data in manifests} == {(None, None)}
    assert not (plain / "digests").exists()
    digests = make(prep, raws, tmp_path / "digests", record, validation_fraction=0.0, digests=True)
    for name in ("tar", "idx"):
        files = [sorted(folder.glob(f"shard-*.{name}")) for folder in (plain, digests)]
        kept = [[path.read_bytes()[64 * (name == "idx") :] for path in some] for some in files]
        assert kept[0] == kept[1]
    found = b"".join(path.read_bytes() for path in sorted((digests / "digests").iterdir()))
    assert len(found) == 16 * len(DIGESTS[False])


def test_a_long_document_has_the_digest_of_its_whole_text(prep: Prep, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    long = "é, the kettle sings. " * 200
    (tmp_path / "raw" / "a.txt").write_text(f"short\n{long}\nlast\n", encoding="utf-8")
    for record in ("documents", "packed"):
        out = tmp_path / record
        prep.plan(tmp_path / "raw", out, num_shards=1, digests=True, **RECORDS[record])
        prep.make(out)
        found = (out / "digests" / "shard-00000.digests").read_bytes()
        assert found == b"".join(map(digest_of, ["short", long.strip(), "last"]))


@pytest.mark.processes
def test_after_a_kill_the_shard_is_made_with_equal_bytes(
    prep: Prep, raws: dict[str, Path], tmp_path: Path
) -> None:
    expected = make(prep, raws, tmp_path / "whole", "packed", num_shards=1)
    out = tmp_path / "killed"
    shutil.copytree(expected, out, ignore=shutil.ignore_patterns("shard-*", "digests"))
    for call in ("write", "fsync"):
        hold = Hold(tmp_path / call, call, r"/digests/\.shard-00000\.digests\.")
        task = prep.start("--shard_id", 0, "--output_dir", out, env=hold.environ())
        hold.wait(1, task)
        task.kill()
        assert task.wait() == -signal.SIGKILL, task.communicate()
        assert list((out / "digests").glob(".shard-*")), "what it left"
    ended = prep.command("--shard_id", 0, "--output_dir", out)
    assert ended.code == 0, ended.text
    assert prep.contents(out) == prep.contents(expected)
    prep.command("clean", out)
    assert prep.temporaries(out) == []


def test_a_flipped_bit_a_missing_file_and_a_wrong_digest_are_found(
    prep: Prep, raws: dict[str, Path], tmp_path: Path
) -> None:
    out = make(prep, raws, tmp_path / "data", "best_fit")
    path = out / "digests" / "shard-00001.digests"
    right = path.read_bytes()
    for bit in (0, 8 * len(right) // 2, 8 * len(right) - 1):
        wrong = bytearray(right)
        wrong[bit // 8] ^= 1 << bit % 8
        path.write_bytes(wrong)
        ended = prep.command("verify", out)
        assert ended.code != 0
        assert "digests/shard-00001.digests" in ended.text
    path.unlink()
    assert "digests/shard-00001.digests" in prep.command("verify", out, "--fast").text
    path.write_bytes(right)
    assert prep.command("verify", out).code == 0


def test_a_worker_that_hashes_another_text_is_found_where_its_shard_is_made_again(
    prep: Prep, raws: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "preprocess.read.documents.digests_of",
            lambda texts: np.frombuffer(b"".join(digest_of(text.decode().upper()) for text in texts), "V16"),
        )
        out = make(prep, raws, tmp_path / "data", "documents")
    ended = prep.command("verify", out, "--deep", 1)
    assert ended.code == 65
    assert ".digests has another sha256" in ended.text


def load(folder: Path, model: Path, world: int = 1, size: int = 6, **options: Any) -> list[list[list[int]]]:
    """The labelled samples of each step, those of all ranks one after another."""
    parts = []
    for rank in range(world):
        settings = {"num_workers": 0, "global_batch_size": size, "rank": rank, "world_size": world, **options}
        with get_llama3_dataloader(folder, size // world, model, **settings) as loader:
            parts.append([labelled(batch) for batch in loader])
    return [[ids for part in step for ids in part] for step in zip(*parts, strict=True)]


def labelled(batch: Any) -> list[list[int]]:
    triples = zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    return [ids[: mask.sum()].tolist() for ids, mask, labels in triples if (labels != -100).any()]


@pytest.mark.parametrize("record", ["documents", "packed"])
def test_the_loader_gives_the_planned_sides_on_every_world(
    prep: Prep, raws: dict[str, Path], tmp_path: Path, record: str
) -> None:
    data, model = make(prep, raws, tmp_path / "data", record), prep.model_dir
    assert prep.command("verify", data).code == 0
    for split, side in zip(("train", "validation"), sides_of(data), strict=True):
        by_world = [load(data, model, world, split=split) for world in (1, 2, 3)]
        assert by_world[1] == by_world[2] == by_world[0]
        plain = load(data, model, size=1, split=split, shuffle=False)
        assert [token for step in plain for ids in step for token in ids] == side.ids
        if record == "documents":
            rows = load(data, model, size=1, split=split, shuffle=False, seq_len=16)
            joined = [token for step in rows for ids in step for token in ids]
            assert joined == side.ids[: len(joined)]
            assert len(side.ids) - len(joined) < 16
        shuffled = {tuple(ids) for step in by_world[0] for ids in step}
        assert shuffled <= {tuple(ids) for step in plain for ids in step}
    copy = tmp_path / "without_index"
    shutil.copytree(data, copy, ignore=shutil.ignore_patterns("index.json"))
    assert load(copy, model, split="validation") == by_world[0]


def test_the_loader_says_which_rule_holds(prep: Prep, raws: dict[str, Path], tmp_path: Path) -> None:
    planned = make(prep, raws, tmp_path / "planned", "packed")
    settings: dict[str, Any] = {"num_workers": 0, "batch_size": 2, "model_id": prep.model_dir}
    with get_llama3_dataloader(planned, split="train", **settings) as loader:
        assert "split: train, by plan, 0.2 of the documents by their content" in loader.describe()
    with get_llama3_dataloader(planned, **settings) as loader:
        assert "with the documents that the plan holds out" in loader.describe()
    (planned / "shard-00000.idx").unlink()
    with (
        get_llama3_dataloader(planned, split="validation", **settings) as loader,
        pytest.raises(Exception, match=r"shard-00000\.idx.* missing"),
    ):
        list(loader)


def test_a_side_of_a_data_set_that_was_planned_without_a_fraction_is_refused(
    prep: Prep, raws: dict[str, Path], tmp_path: Path
) -> None:
    whole = make(prep, raws, tmp_path / "whole", "packed", validation_fraction=0.0)
    with pytest.raises(UsageError, match="--validation_fraction"):
        get_llama3_dataloader(whole, split="train", num_workers=0, batch_size=2, model_id=prep.model_dir)


def test_export_peek_and_report_know_the_sides(prep: Prep, raws: dict[str, Path], tmp_path: Path) -> None:
    data = make(prep, raws, tmp_path / "data", "packed")
    for split, side in zip(("train", "validation"), sides_of(data), strict=True):
        out = tmp_path / split
        ended = prep.command("export", data, "--to", "nanogpt", "--split", split, "--output_dir", out)
        assert ended.code == 0, ended.text
        assert np.fromfile(out / "train.bin", "<u2").tolist() == side.ids
    shown = prep.command("peek", data, "--num", 10**6).text
    assert shown.count(" tokens, for validation, ") == sides_of(data)[1].counts[0]
    everything = tmp_path / "all"
    assert prep.command("export", data, "--to", "hf", "--output_dir", everything).code == 0
