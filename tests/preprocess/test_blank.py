"""``blank`` removes documents from the disk while all others keep their places; ``plan --exclude``."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader import BrokenShard, TokenLoader
from tests.forged import rewrite_json, rewrite_plan
from tests.input_writers import table_bytes
from tests.word_tokenizers import save_word_tokenizer
from tests.world import World, refuses

NUM_DOCUMENTS, PAD, EOS, VOCAB_SIZE = 400, 500, 501, 502  # every id of document 7 is 7
BLANK = 2**31 - 1
BLANKED = sorted(random.Random(1).sample(range(1, NUM_DOCUMENTS + 1), 20))
_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} "
    "{% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
)
# Input, how its documents are named, and options.
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "json": ("a.jsonl", "id", {"digests": True}),
    "npy": ("in/a: b.jsonl.gz", "place", {"token_format": "npy", "keep_text": False, "append_eos": True}),
    "concat": ("a.txt", "place", {"record": "packed", "seq_len": 16, "append_eos": True}),
    "best fit": ("a.parquet", "place", {"record": "packed", "seq_len": 16, "pack": "best_fit"}),
    "chat": ("a.jsonl", "id", {"record": "chat", "seq_len": 16, "text_field": "chat", "digests": True}),
    "sides": (
        "a.jsonl", "text", {"record": "packed", "seq_len": 16, "pack": "best_fit", "validation_fraction": 0.3}
    ),
}  # fmt: skip
# Form of the data set and arguments of the loader. tests/loader/test_origins.py compares ids of more forms.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("json", {}),
    "one width": ("json", {"max_length": 40, "padding": "max_length", "targets": "shifted"}),
    "joined with boundaries": ("json", {"seq_len": 16, "boundaries": ["segment_ids", "cu_seqlens"]}),
    "joined with EOS": ("npy", {"seq_len": 16, "boundaries": "transformers"}),
    "packed with boundaries": ("concat", {"boundaries": ["segment_ids", "position_ids"]}),
    "best fit": ("best fit", {"boundaries": "transformers"}),
    "chat": ("chat", {"boundaries": "segment_ids"}),
    "shifted": ("concat", {"targets": "shifted"}),
    "for validation": ("sides", {"split": "validation"}),
}
Made = Callable[[str], tuple[World, World]]


def each(names: Iterable[str]) -> list[Any]:
    """Return test parameters. Planning conversations starts a process, so "chat" is marked."""
    return [pytest.param(name, marks=[pytest.mark.processes] * (name == "chat")) for name in names]


def text_of(number: int) -> str:
    return " ".join([f"w{number}"] * random.Random(number).choice([1, 2, 5, 9, 20, 50]))


def written(name: str) -> tuple[bytes, list[int]]:
    """Return an input with all documents, and the place of each."""
    records = []
    for number in range(1, NUM_DOCUMENTS + 1):
        words = text_of(number).split()
        turns = [("user", words[:2]), ("assistant", words)]
        chat = [{"role": role, "content": " ".join(said)} for role, said in turns]
        records.append({"id": f"d{number}", "text": " ".join(words), "chat": chat})
    if name.endswith(".parquet"):
        return table_bytes(records, "parquet", rows=50), [*range(NUM_DOCUMENTS)]
    lines = [f"{record['text'] if '.txt' in name else json.dumps(record)}\n".encode() for record in records]
    data, places = b"".join(lines), [sum(map(len, lines[:number])) for number in range(len(lines))]
    return gzip.compress(data) if name.endswith(".gz") else data, places


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Returns a data set of a form, and a copy with the documents in ids.txt blanked: 5 % of all."""
    root = tmp_path_factory.mktemp("data")
    # Ids of this vocabulary take two bytes.
    save_word_tokenizer(root / "model", VOCAB_SIZE, splits=True, chat_template=_TEMPLATE)
    worlds: dict[str, tuple[World, World]] = {}

    def make(form: str) -> tuple[World, World]:
        if form not in worlds:
            name, kind, options = FORMS[form]
            data, places = written(name)
            world = World(root / form, tokenizer=root / "model").raw({name: data})
            world.make(num_shards=2, recursive=True, id_field="id" if kind == "id" else None, **options)
            names = {"id": "d{0}", "text": "sha256:{1}", "place": f"at:{name}:{{2}}"}[kind]
            shas = [hashlib.sha256(text_of(number).encode()).hexdigest() for number in BLANKED]
            lines = [
                names.format(number, sha, places[number - 1]) + "\n"
                for number, sha in zip(BLANKED, shas, strict=True)
            ]
            (root / form / "ids.txt").write_text("".join(lines))
            worlds[form] = world, world.blanked(root / form / "ids.txt", root / form / "new")
        return worlds[form]

    return make


def all_ids(loader: TokenLoader) -> set[int]:
    with loader:
        return {token for batch in loader for token in batch["input_ids"].flatten().tolist()}


def padded(batch: Mapping[str, Any], *, shifted: bool) -> dict[str, Any]:
    """Convert a batch of DATA to the expected batch of NEW: blanked documents are padding without labels."""
    found = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    found = {**batch, **found}
    ids, labels = found["input_ids"], found["labels"]
    gone = torch.isin(ids, torch.tensor(BLANKED))
    for row, column in (gone.roll(1, 1) & (ids == EOS)).nonzero().tolist():
        gone[row, column] |= column > 0  # the EOS after a document belongs to it
    ids[gone] = PAD
    if shifted:  # a label is the id of the next place
        labels[gone | torch.isin(labels, torch.tensor(BLANKED))] = -100
    else:
        labels[gone] = -100
        labels[:, 1:][gone[:, :-1]] = -100
    if "attention_mask" in found:
        found["attention_mask"][gone] = 0
        found["attention_mask"][(found["attention_mask"] == 0).all(1), 0] = 1
    return found


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Compare batches, and return whether they have padding. An EOS at the begin of a row may differ."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            assert (torch.as_tensor(found[name]) == torch.as_tensor(value)).all(), name
            continue
        differs = found[name] != value
        differs[:, 0] &= expected["input_ids"][:, 0] != EOS
        differs[:, 1:2] &= ~((expected["input_ids"][:, :1] == EOS) & (found["labels"][:, 1:2] == -100))
        assert not differs.any(), (name, found[name][differs.any(1)], value[differs.any(1)])
    return bool((expected["input_ids"] == PAD).any())


@pytest.mark.parametrize("case", each(CASES))
def test_blanked_documents_become_padding_and_everything_else_stays(made: Made, case: str) -> None:
    """Also on two ranks that resume from a state of the original data set."""
    form, options = CASES[case]
    world, new = made(form)
    options, shifted = {"seed": 3, **options}, options.get("targets") == "shifted"
    with world.loader(batch_size=12, **options) as loader, new.loader(batch_size=12, **options) as of_new:
        middle, num_steps = len(loader) // 2, len(loader)
        state = json.loads(json.dumps(loader.state_at(middle)))
        expected = [padded(batch, shifted=shifted) for _ in range(2) for batch in loader]
        seen = [assert_same(*pair) for pair in zip((*of_new, *of_new), expected, strict=True)]
        assert any(seen)
        assert not all_ids(of_new) & {*BLANKED}
    for rank in range(2):
        with new.loader(batch_size=6, rank=rank, world_size=2, **options) as loader:
            loader.load_state_dict(state)
            step = middle
            for step, batch in enumerate(loader, middle):
                width, names = batch["labels"].shape[1], ("input_ids", "labels")
                of_rank = {name: expected[step][name][6 * rank : 6 * rank + 6, :width] for name in names}
                assert_same({name: batch[name] for name in names}, of_rank)
        assert step == num_steps - 1


@pytest.mark.parametrize("form", each(FORMS))
def test_nothing_of_a_blanked_document_is_left_on_disk(made: Made, form: str) -> None:
    """``verify --deep`` makes equal shards again."""
    world, new = made(form)
    texts = [text_of(number).encode() for number in BLANKED]
    traces = [text for text in texts if len(text) > 10] + [f'"d{number}"'.encode() for number in BLANKED]
    traces += [hashlib.sha256(text).digest()[:16] for text in texts]
    if form == "json":
        traces += [json.dumps([number] * 5).encode()[1:-1] for number in BLANKED]
    else:
        traces += [np.full(5, number, "<u2").tobytes() for number in BLANKED]
    of_data, of_new = (
        b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
        for folder in (world.data_dir, new.data_dir)
    )
    assert sum(trace in of_data for trace in traces) > 9
    assert [trace for trace in traces if trace in of_new] == []
    # The id that marks a blanked token is outside every vocabulary.
    assert (str(BLANK).encode() if form == "json" else np.full(1, BLANK & 0xFFFF, "<u2").tobytes()) in of_new
    new.verify(deep=2)


def test_a_batch_without_any_label_is_logged_once(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    with made("json")[1].loader(batch_size=1) as loader:
        empty = [batch for batch in loader if (batch["labels"] == -100).all()]
    assert len(empty) >= len(BLANKED) - 1
    assert all(batch["attention_mask"].sum() == 1 for batch in empty)
    assert caplog.text.count("a batch has no labels") == 1


@pytest.mark.parametrize("form", ["json", "concat"])
def test_a_collate_fn_gets_padding_and_ignored_labels_for_blanked_documents(made: Made, form: str) -> None:
    options: dict[str, Any] = {"batch_size": 12, "seq_len": 16, "collate_fn": lambda samples: samples}
    with made(form)[0].loader(**options) as loader, made(form)[1].loader(**options) as of_new:
        num_gone = 0
        pairs: Any = zip(loader, of_new, strict=True)
        for batch, found in pairs:
            for before, after in zip(batch, found, strict=True):
                gone = np.isin(before["input_ids"], BLANKED)
                num_gone += gone.sum()
                assert (np.array(after["input_ids"])[gone] == PAD).all()
                assert (np.array(after["labels"])[gone] == -100).all()
        assert num_gone > 20


def test_a_shard_needs_its_list_of_blanked_documents(made: Made, tmp_path: Path) -> None:
    new = made("sides")[1].copy(tmp_path, but=["shard-00001.json"])
    new.try_shard(1).ends(65, "blanked/shard-00001.json")
    assert not (new.data_dir / "shard-00001.json").exists()


def test_verify_tells_a_blanked_data_set_from_the_one_it_was_made_from(made: Made, tmp_path: Path) -> None:
    """Shards and plan of the one among those of the other, which have the same id of the plan."""
    world, blanked = made("sides")
    of_shard = [name for name in world.contents() if "shard-00001" in name]
    for number, (kept, put, moved) in enumerate(
        [(blanked, world, of_shard), (world, blanked, of_shard), (world, blanked, ["plan.json"])]
    ):
        copy = kept.copy(tmp_path / str(number))
        for name in moved:
            shutil.copyfile(put.data_dir / name, copy.data_dir / name)
        copy.main("verify", copy.data_dir).ends(65, "shard 00001")


def test_a_blanked_data_set_replaces_the_copy_of_the_one_before(made: Made, tmp_path: Path) -> None:
    world, blanked = made("sides")
    node = World(tmp_path, data_dir=tmp_path / "node")
    for each in (world, blanked):
        world.main("stage", each.data_dir, to=node.data_dir).ends(0)
    assert node.contents() == blanked.contents()
    node.verify()


def test_verify_reads_the_lists_of_blanked_documents(made: Made, tmp_path: Path) -> None:
    copy = made("sides")[1].copy(tmp_path)
    path = copy.data_dir / "blanked/shard-00001.json"
    before = path.read_bytes()
    for value in ({"plan_id": "0" * 64}, {"shard_id": 0}, {"unblanked_sha256": "0" * 64}):
        rewrite_json(path, **value)
        code = 65 if "unblanked_sha256" in value else 78
        copy.main("verify", copy.data_dir, fast=True).ends(code, path)
        path.write_bytes(before)
    copy.verify()


@pytest.fixture(scope="module")
def twice(made: Made, tmp_path_factory: pytest.TempPathFactory) -> tuple[World, World, World]:
    """Two copies, each without another document of the same shard, and the first one blanked again."""
    world = made("json")[0]
    root = tmp_path_factory.mktemp("twice")
    for number in (1, 2):
        (root / f"{number}.txt").write_text(f"d{number}\n")
    first = world.blanked(root / "1.txt", root / "first")
    other = world.blanked(root / "2.txt", root / "other")
    return first, other, first.blanked(root / "2.txt", root / "both")


def test_a_list_of_another_blanked_copy_is_refused(twice: tuple[World, World, World], tmp_path: Path) -> None:
    """Else a shard made again would have what was blanked. Both copies have the id of the same plan."""
    first, other, _ = twice
    copy = first.copy(tmp_path / "first")
    name = "blanked/shard-00000.json"
    path = copy.data_dir / name
    shutil.copyfile(other.data_dir / name, path)
    copy.main("verify", copy.data_dir).ends(65, path)
    copy.main("stage", copy.data_dir, to=tmp_path / "node").ends(65, path)
    (copy.data_dir / "shard-00000.json").unlink()
    copy.try_shard(0).ends(65, path)
    shutil.copyfile(first.data_dir / name, path)
    copy.try_shard(0).ends(0)
    assert copy.contents() == first.contents()


@pytest.mark.parametrize("is_shard", [True, False])
def test_verify_finds_a_shard_that_another_list_blanked(
    twice: tuple[World, World, World], tmp_path: Path, is_shard: bool
) -> None:
    """Either the shard or list and plan are of the other copy."""
    first, other, _ = twice
    copy = first.copy(tmp_path / "first")
    of_shard = [name for name in other.contents() if name.rpartition(".")[0].endswith("shard-00000")]
    of_shard.remove("blanked/shard-00000.json")
    for name in of_shard if is_shard else ["blanked/shard-00000.json", "plan.json"]:
        shutil.copyfile(other.data_dir / name, copy.data_dir / name)
    copy.main("verify", copy.data_dir, fast=True).ends(65, "shard 00000")


def test_the_index_from_before_blanking_is_refused(made: Made, tmp_path: Path) -> None:
    """By it the loader would give the id of a blanked token. The tars of both have the same sizes."""
    world, blanked = made("concat")
    copy = blanked.copy(tmp_path)
    index = copy.data_dir / "index.json"
    shutil.copyfile(world.data_dir / "index.json", index)
    with refuses(BrokenShard, path=index):
        copy.loader()
    assert copy.main("status", copy.data_dir).ends(0).out.splitlines()[-1].startswith("next: ")
    copy.verify()
    with copy.loader(batch_size=4) as loader, blanked.loader(batch_size=4) as expected:
        for pair in zip(loader, expected, strict=True):
            assert_same(*pair)


@pytest.mark.parametrize("name", ["shard-00000.tar", "shard-00001.tar", "digests/shard-00001.digests"])
def test_blank_that_is_run_again_finds_what_was_altered_since(
    made: Made, twice: tuple[World, World, World], tmp_path: Path, name: str
) -> None:
    world = made("json")[0]
    copy = twice[0].copy(tmp_path)
    names = tmp_path / "names.txt"
    names.write_text("d1\n")
    path = copy.data_dir / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    world.main("blank", world.data_dir, ids=names, output=copy.data_dir).ends(65, path)
    path.write_bytes(content)
    world.main("blank", world.data_dir, ids=names, output=copy.data_dir).ends(0)


def test_a_data_set_that_is_blanked_again_replaces_the_copy_of_the_one_before(
    twice: tuple[World, World, World], tmp_path: Path
) -> None:
    first, _, both = twice
    node = World(tmp_path, data_dir=tmp_path / "node")
    for each in (first, both):
        first.main("stage", each.data_dir, to=node.data_dir).ends(0)
    assert node.contents() == both.contents()


@pytest.mark.parametrize("is_blanked", [False, True])
def test_an_id_outside_of_the_planned_vocabulary_is_refused(
    made: Made, tmp_path: Path, is_blanked: bool
) -> None:
    world = made("json")[is_blanked].copy(tmp_path)
    (world.data_dir / "shard-00001.json").unlink()
    forged = {"pad_token_id": (PAD, 0), "eos_token_id": (EOS, 1), "vocab_size": (VOCAB_SIZE, NUM_DOCUMENTS)}
    for name, (before, now) in forged.items():
        rewrite_plan(world.data_dir / "plan.json", f'"{name}":{before}', f'"{name}":{now}')
    if is_blanked:
        rewrite_json(world.data_dir / "blanked/shard-00001.json", plan_id=world.plan_json()["plan_id"])
    world.try_shard(1).ends(78, f"the id {NUM_DOCUMENTS}")  # of the last document


def test_other_shards_are_shared_and_blanking_again_keeps_earlier_blanks(made: Made, tmp_path: Path) -> None:
    world, names = made("json")[0], tmp_path / "names.txt"
    names.write_text("d1\n")
    new = world.blanked(names, tmp_path / "new")
    shared = [path.name for path in new.data_dir.glob("*.tar") if path.samefile(world.data_dir / path.name)]
    assert shared == ["shard-00001.tar"]
    names.write_text(f"d2\nsha256:{hashlib.sha256(text_of(400).encode()).hexdigest()}\n")
    newer = new.blanked(names, tmp_path / "newer").verify(deep=2)
    ids = all_ids(newer.loader(batch_size=1))
    assert not ids & {1, 2, 400}
    assert len(ids - {PAD, EOS}) == NUM_DOCUMENTS - 3
    names.write_text("d3\n")
    ended = new.main("blank", new.data_dir, ids=names, output=newer.data_dir)
    assert ended.code == 78, "the folder was begun with another list"
    # Neither export nor peek shows blanked documents.
    assert world.main("export", newer.data_dir, to="megatron", output_dir=tmp_path / "out").code == 78
    shown = world.main("peek", newer.data_dir, "0:0").out
    assert ("blanked" in shown, "w1" in shown) == (True, False)


def test_all_kinds_of_names_work_and_unknown_ones_are_reported(made: Made, tmp_path: Path) -> None:
    world, (_, places) = made("json")[0], written("a.jsonl")
    right = [f"at:a.jsonl:{places[4]}", f"sha256:{hashlib.sha256(text_of(5).encode()).hexdigest()}", "d5"]
    wrong = [f"at:a.jsonl:{places[4] + 1}", "at:b.jsonl:0", f"at:a.jsonl:{10**17}", "nobody"]
    names = tmp_path / "names.txt"
    names.write_text("\n".join(right))
    new = world.blanked(names, tmp_path / "new")
    names.write_text("\n".join([*right, *wrong]))
    ended = world.main("blank", world.data_dir, ids=names, output=new.data_dir).ends(66)
    assert all(line in ended.out for line in wrong)
    assert not any(line in ended.out.split() for line in right)
    names.write_text("nobody")
    assert world.main("blank", world.data_dir, ids=names, output=tmp_path / "none").code == 66
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("form", each(FORMS))
def test_plan_exclude_leaves_out_the_same_list(made: Made, tmp_path: Path, form: str) -> None:
    world, (_, kind, options) = made(form)[0], FORMS[form]
    fresh = World(tmp_path, tokenizer=world.tokenizer, raw_dir=world.raw_dir)
    options = {"num_shards": 2, "recursive": True, "id_field": "id" if kind == "id" else None, **options}
    fresh.make(exclude=world.raw_dir.with_name("ids.txt"), **options)
    assert fresh.left_out() == {"excluded": len(BLANKED)}
    assert not all_ids(fresh.loader(batch_size=1)) & {*BLANKED}
    assert fresh.try_plan(**options).code == 78, "a plan without the list differs"
    other = fresh.copy(tmp_path / "other", but=["shard-*"])
    (other.data_dir / "excluded.keys").write_bytes(bytes(16))
    assert other.try_shard(0).code == 65, "the list differs from the plan's"


@pytest.mark.parametrize("is_file", [True, False])
def test_a_folder_of_side_files_that_is_missing_or_a_file_is_named(tmp_path: Path, is_file: bool) -> None:
    """Of a shard that is only linked."""
    world = World(tmp_path).raw({"a.txt": "one\ntwo\n", "b.txt": b"three\n\xff\n"})
    world.plan(num_shards=2, max_bad_fraction=0.9).run(max_bad_fraction=0.9)
    folder = world.data_dir / "quarantine"
    shutil.rmtree(folder)
    if is_file:
        folder.touch()
    listed = tmp_path / "listed"
    listed.write_text("at:a.txt:0\n", encoding="ascii")
    ended = world.main("blank", world.data_dir, "--ids", listed, "--output", tmp_path / "new")
    ended.ends(66, folder / "shard-00001.jsonl", "missing")
