"""blank: documents are gone from the disk, and all others keep their places; plan --exclude."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader import TokenLoader, get_llama3_dataloader
from shardprep.errors import ShardprepError
from tests.killed_calls import killed_at
from tests.word_tokenizers import save_word_tokenizer
from tests.world import Ended, World, call_main

pytestmark = pytest.mark.processes  # blank makes shards as run does

NUM_DOCUMENTS, PAD, EOS, VOCAB_SIZE = 400, 500, 501, 502  # every id of document 7 is 7
BLANK = 2**31 - 1
BLANKED = frozenset(random.Random(1).sample(range(1, NUM_DOCUMENTS + 1), 20))
_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} "
    "{% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
)
FORMS: dict[str, dict[str, Any]] = {
    "json": {"digests": True},
    "npy": {"token_format": "npy", "keep_text": False, "append_eos": True},
    "concat": {"record": "packed", "seq_len": 16, "append_eos": True},
    "best fit": {"record": "packed", "seq_len": 16, "pack": "best_fit", "append_eos": True},
    "chat": {"record": "chat", "seq_len": 16, "text_field": "chat", "digests": True},
    "best fit of sides": {"record": "packed", "seq_len": 16, "pack": "best_fit", "validation_fraction": 0.3},
}
# Of a data set, and the loader's arguments.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("json", {}),
    "cut": ("npy", {"max_length": 5}),
    "grouped": ("npy", {"group_by_length": 2}),
    "one width": ("json", {"max_length": 40, "padding": "max_length", "targets": "shifted"}),
    "joined": ("json", {"seq_len": 16}),
    "joined with boundaries": ("json", {"seq_len": 16, "boundaries": ["segment_ids", "cu_seqlens"]}),
    "joined with EOS": ("npy", {"seq_len": 16, "boundaries": "transformers"}),
    "packed": ("concat", {}),
    "packed with boundaries": ("concat", {"boundaries": ["segment_ids", "position_ids"]}),
    "best fit": ("best fit", {"boundaries": "transformers"}),
    "chat": ("chat", {"boundaries": "segment_ids"}),
    "shifted": ("concat", {"targets": "shifted"}),
    "for validation": ("best fit of sides", {"split": "validation"}),
    "for training": ("best fit of sides", {"split": "train"}),
}  # fmt: skip


def text_of(number: int) -> str:
    return " ".join([f"w{number}"] * random.Random(number).choice([1, 2, 5, 9, 20, 50]))


def succeed(*words: object) -> None:
    ended = call_main(*words)
    assert ended.code == 0, ended.text


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of each form, and beside it FORM.new, in which about 5 % of the documents are blanked."""
    root = tmp_path_factory.mktemp("data")
    # Every id of Llama 3 takes four bytes, and of this vocabulary two.
    save_word_tokenizer(root / "model", VOCAB_SIZE, splits=True, chat_template=_TEMPLATE)
    records = []
    for number in range(1, NUM_DOCUMENTS + 1):
        words = text_of(number).split()
        turns = [("user", words[:2]), ("assistant", words)]
        chat = [{"role": role, "content": " ".join(said)} for role, said in turns]
        records.append({"id": f"d{number}", "text": " ".join(words), "chat": chat})
    (root / "ids.txt").write_text("".join(f"d{number}\n" for number in sorted(BLANKED)))
    for name, options in FORMS.items():
        world = World(root, tokenizer=root / "model", data_dir=root / name).raw({"all.jsonl": records})
        world.make(num_shards=2, id_field="id", **options)
        succeed("blank", root / name, "--ids", root / "ids.txt", "--output", root / f"{name}.new")
    return root


def load(data: Path, name: str, world: int = 1, rank: int = 0, **options: Any) -> TokenLoader:
    given = {"batch_size": 12 // world, "num_workers": 0, "seed": 3, **options}
    return get_llama3_dataloader(data / name, rank=rank, world_size=world, **given)


def blank(source: Path, lines: str, new: Path) -> Ended:
    names = new.with_name(f"names of {new.name}")
    names.write_text(lines)
    return call_main("blank", source, "--ids", names, "--output", new)


def all_ids(loader: TokenLoader) -> set[int]:
    with loader:
        return {token for batch in loader for token in batch["input_ids"].flatten().tolist()}


def sha256_of(number: int) -> str:
    return f"sha256:{hashlib.sha256(text_of(number).encode()).hexdigest()}\n"


def padded(batch: Mapping[str, Any], *, shifted: bool) -> dict[str, Any]:
    """Return a batch of DATA as one of NEW has to be: blanked documents are padding, with no labels."""
    found = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    found = {**batch, **found}
    ids, labels = found["input_ids"], found["labels"]
    gone = torch.isin(ids, torch.tensor(sorted(BLANKED)))
    for row, column in (gone.roll(1, 1) & (ids == EOS)).nonzero().tolist():
        gone[row, column] |= column > 0  # the EOS behind a document is its
    ids[gone] = PAD
    if shifted:  # a label is of the next place
        labels[gone | torch.isin(labels, torch.tensor(sorted(BLANKED)))] = -100
    else:
        labels[gone] = -100
        labels[:, 1:][gone[:, :-1]] = -100
    if "attention_mask" in found:
        found["attention_mask"][gone] = 0
        found["attention_mask"][(found["attention_mask"] == 0).all(1), 0] = 1
    return found


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Compare batches; an EOS at the begin of a row may be of a document of the row before."""
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


@pytest.mark.parametrize("case", CASES)
def test_blanked_documents_are_padding_where_they_stood_and_all_else_stays(data: Path, case: str) -> None:
    form, options = CASES[case]
    shifted = options.get("targets") == "shifted"
    with load(data, form, **options) as loader, load(data, f"{form}.new", **options) as of_new:
        assert len(loader) == len(of_new) > 1
        seen = []
        for _ in range(2):
            for batch, found in zip(loader, of_new, strict=True):
                seen.append(assert_same(found, padded(batch, shifted=shifted)))
        assert any(seen)
        assert not BLANKED & all_ids(of_new)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_a_blanked_document_is_left_on_the_disk(data: Path, form: str) -> None:
    texts = [text_of(number).encode() for number in BLANKED]
    traces = [text for text in texts if len(text) > 10] + [f'"d{number}"'.encode() for number in BLANKED]
    traces += [hashlib.sha256(text).digest()[:16] for text in texts]
    if form == "json":
        traces += [json.dumps([number] * 5).encode()[1:-1] for number in BLANKED]
    else:
        traces += [np.full(5, number, "<u2").tobytes() for number in BLANKED]
    of_data, of_new = (
        b"".join(path.read_bytes() for path in sorted((data / name).rglob("*")) if path.is_file())
        for name in (form, f"{form}.new")
    )
    assert sum(trace in of_data for trace in traces) > 20
    assert [trace for trace in traces if trace in of_new] == []
    # An id that no embedding has.
    assert (str(BLANK).encode() if form == "json" else np.full(1, BLANK & 0xFFFF, "<u2").tobytes()) in of_new


@pytest.mark.parametrize("case", ["padded", "joined", "packed", "chat"])
def test_a_state_of_data_goes_on_in_new_on_other_ranks(data: Path, case: str) -> None:
    form, options = CASES[case]
    with load(data, form, **options) as loader:
        state = json.loads(json.dumps(loader.state_at(len(loader) // 2)))
        expected = [batch["labels"] for batch in loader][len(loader) // 2 :]
    ranks = []
    for rank in range(2):
        with load(data, f"{form}.new", 2, rank, **options) as loader:
            loader.load_state_dict(state)
            ranks.append([batch["labels"] for batch in loader])
    num_blanked = 0
    for step, wanted in enumerate(expected):
        found = [labels for rank in ranks for labels in rank[step]]
        for labels, of_data in zip(found, wanted, strict=True):
            width = min(len(labels), len(of_data))
            differs = labels[:width] != of_data[:width]
            assert (labels[:width][differs] == -100).all()
            num_blanked += int(differs.sum())
    assert num_blanked


def test_a_batch_without_any_label_is_told_once(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load(data, "json.new", batch_size=1) as loader:
        empty = [batch for batch in loader if (batch["labels"] == -100).all()]
    assert len(empty) >= len(BLANKED) - 1
    assert all(batch["attention_mask"].sum() == 1 for batch in empty)
    assert caplog.text.count("a batch has no label left") == 1


@pytest.mark.parametrize("form", ["json", "concat"])
def test_a_collate_fn_gets_labels_and_other_ids(data: Path, form: str) -> None:
    options: dict[str, Any] = {"seq_len": 16, "collate_fn": lambda samples: samples}
    with load(data, form, **options) as loader, load(data, f"{form}.new", **options) as of_new:
        num_gone = 0
        pairs: Any = zip(loader, of_new, strict=True)
        for batch, found in pairs:
            for before, after in zip(batch, found, strict=True):
                gone = np.isin(before["input_ids"], sorted(BLANKED))
                num_gone += gone.sum()
                assert (np.array(after["input_ids"])[gone] == PAD).all()
                assert (np.array(after["labels"])[gone] == -100).all()
        assert num_gone > 20


def test_a_mixture_blanks_the_documents_of_each_of_its_sources(data: Path) -> None:
    options: dict[str, Any] = {"weights": {"a": 1, "b": 1}, "num_workers": 0, "weights_in": "samples"}
    for kinds in (["json.new", "npy.new"], ["concat.new", "best fit.new"]):
        folders = dict(zip("ab", [data / kind for kind in kinds], strict=True))
        ids = all_ids(get_llama3_dataloader(folders, 12, **options))
        assert not ids & BLANKED
        assert max(ids) < VOCAB_SIZE


def test_a_kill_at_any_call_leaves_data_whole_and_new_whole_or_not_done(data: Path, tmp_path: Path) -> None:
    def tars(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.glob("*.tar")}

    new, rows = tmp_path / "new", data / "concat"
    before = {path: path.read_bytes() for path in rows.rglob("*") if path.is_file()}
    words = [*map(str, ["blank", rows, "--ids", data / "ids.txt", "--output", new, "--num_proc", 1])]
    at = num_not_done = 1
    while os.WIFSIGNALED(killed_at(at, words)):
        if len(list(new.glob("shard-*.json"))) == 2:
            assert tars(new) == tars(data / "concat.new")
        else:
            num_not_done += 1
            with pytest.raises(ShardprepError):
                load(tmp_path, "new")
        if at % 2:  # else it goes on
            shutil.rmtree(new, ignore_errors=True)
        at = at * 4 // 3 + 1
    assert num_not_done > 5
    assert tars(new) == tars(data / "concat.new")
    assert {path: path.read_bytes() for path in rows.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("form", ["json", "best fit of sides", "chat"])
def test_whoever_makes_a_blanked_shard_again_makes_an_equal_one(
    data: Path, form: str, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    shutil.copytree(data / f"{form}.new", new)
    before = {path.name: path.read_bytes() for path in new.glob("*.tar")}
    (new / "shard-00001.tar").unlink()
    (new / "shard-00001.json").unlink()
    succeed("--shard_id", 1, "--output_dir", new)
    assert {path.name: path.read_bytes() for path in new.glob("*.tar")} == before
    succeed("verify", new, "--deep", 2)
    (new / "blanked" / "shard-00001.json").unlink()
    (new / "shard-00001.json").unlink()
    ended = call_main("--shard_id", 1, "--output_dir", new)
    assert ended.code != 0
    assert "blanked/shard-00001.json" in ended.err
    assert not (new / "shard-00001.json").exists()


def test_other_shards_are_the_same_files_and_what_was_blanked_stays_so(data: Path, tmp_path: Path) -> None:
    new, newer = tmp_path / "new", tmp_path / "newer"
    assert blank(data / "json", "d1\n", new).code == 0
    shared = [path.name for path in new.glob("*.tar") if path.samefile(data / "json" / path.name)]
    assert shared == ["shard-00001.tar"]
    assert blank(new, "d2\n" + sha256_of(400), newer).code == 0
    succeed("verify", newer, "--deep", 2)
    ids = all_ids(load(tmp_path, "newer", batch_size=1))
    assert not ids & {1, 2, 400}
    assert len(ids - {PAD, EOS}) == NUM_DOCUMENTS - 3
    assert blank(new, "d3\n", newer).code == 78, "another list began it"


def test_names_that_are_not_there_are_told_and_the_others_blanked(data: Path, tmp_path: Path) -> None:
    ended = blank(data / "npy", "d1\nnobody\n", tmp_path / "new")
    assert (ended.code, "nobody" in ended.out) == (66, True)
    succeed("verify", tmp_path / "new")
    assert blank(data / "npy", "nobody\n", tmp_path / "none").code == 66
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("lines", ["", "sha256:12\n", "\n \n", "\xff\n"])
def test_a_list_that_names_nothing_is_refused(data: Path, tmp_path: Path, lines: str) -> None:
    (tmp_path / "ids.txt").write_text(lines, encoding="latin-1")
    words = ["blank", data / "npy", "--ids", tmp_path / "ids.txt", "--output", tmp_path / "new"]
    assert call_main(*words).code == 65
    (tmp_path / "ids.txt").unlink()
    assert call_main(*words).code == 66


def test_blanked_documents_are_not_exported_and_peek_says_what_they_are(data: Path, tmp_path: Path) -> None:
    words = ["export", data / "json.new", "--to", "megatron", "--output_dir", tmp_path / "out"]
    assert call_main(*words).code == 78
    first = min(BLANKED)
    shown = call_main("peek", data / "json.new", f"0:{first - 1}").out
    assert "blanked" in shown
    assert f"w{first}" not in shown


@pytest.mark.parametrize("form", ["json", "concat", "best fit of sides", "chat"])
def test_a_fresh_plan_leaves_the_same_list_out(data: Path, tmp_path: Path, form: str) -> None:
    (tmp_path / "texts.txt").write_text("".join(map(sha256_of, BLANKED)))
    for names in (data / "ids.txt", tmp_path / "texts.txt")[: 1 if form == "chat" else 2]:
        world = World(tmp_path / names.stem, tokenizer=data / "model", raw_dir=data / "raw")
        options = {"num_shards": 2, "id_field": "id", **FORMS[form]}
        world.make(exclude=names, **options)
        assert world.left_out() == {"excluded": len(BLANKED)}
        assert not all_ids(world.loader(batch_size=1)) & BLANKED
        assert world.try_plan(**options).code == 78, "without the list it is another plan"


def test_a_worker_refuses_a_list_that_is_not_the_plans(tmp_path: Path) -> None:
    world, names = (
        World(tmp_path).raw({"all.jsonl": [{"text": "one"}, {"text": "two"}]}),
        tmp_path / "names.txt",
    )
    names.write_text(f"sha256:{hashlib.sha256(b'one').hexdigest()}\n")
    world.plan(num_shards=1, exclude=names)
    (world.data_dir / "excluded.keys").write_bytes(bytes(16))
    assert world.try_shard(0).code == 65
    names.write_text("web/17\n")
    assert world.try_plan(exclude=names, output_dir=tmp_path / "new").code == 2, "it knows no ids"
