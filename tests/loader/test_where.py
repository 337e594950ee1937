"""``shardprep where``: it names the documents that a run of two ranks really saw."""

from __future__ import annotations

import contextlib
import io
import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from loader import TokenLoader, get_llama3_dataloader
from shardprep.__main__ import main
from shardprep.format.plan import need_plan
from shardprep.format.shards import ShardSamples

if TYPE_CHECKING:
    from tests.conftest import Prep

BATCH, RANKS, STEP = 4, 2, 3
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("documents", {}),
    "truncated": ("documents", {"max_length": 30}),
    "grouped": ("documents", {"group_by_length": 4}),
    "not shuffled": ("documents", {"shuffle": False}),
    "packed at load": ("documents", {"seq_len": 64}),
    "packed": ("packed", {}),
    "planned side": ("sides", {"split": "train"}),
    "batches grow": ("documents", {"global_batch_size": [(0, 16), (2, 32)]}),
}


@pytest.fixture(scope="module")
def folders(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    prep.plan(sample_dir, root / "documents", num_shards=3)
    prep.plan(sample_dir, root / "packed", num_shards=3, record="packed", seq_len=64)
    prep.plan(sample_dir, root / "sides", num_shards=3, record="packed", seq_len=64, validation_fraction=0.2)
    for name in ("documents", "packed", "sides"):
        prep.make(root / name)
    return {name: root / name for name in ("documents", "packed", "sides")}


def load(folder: Path, rank: int = 0, **options: Any) -> TokenLoader:
    given = {"num_workers": 0, "world_size": RANKS, "rank": rank, "global_batch_size": 16, "seed": 5}
    return get_llama3_dataloader(folder, BATCH, **{**given, **options})


def where(*args: object) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(["where", *map(str, args)])
    return code, out.getvalue()


def answer(*args: object) -> Any:
    code, text = where(*args, "--json")
    assert code == 0, text
    return json.loads(text.splitlines()[-1])


def trained(folder: Path, options: dict[str, Any], step: int) -> dict[tuple[int, int, int], list[int]]:
    """The ids of each row of a step, without padding, by (rank, batch, row)."""
    found = {}
    for rank in range(RANKS):
        with load(folder, rank, **options) as loader:
            loader.load_state_dict(loader.state_at(step))
            for number, batch in enumerate(loader):
                rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
                for row, (ids, mask) in enumerate(rows):
                    found[rank, number, row] = ids[: int(mask.sum())].tolist()
                if loader.ends_step:
                    break
    return found


def stored_ids(folder: Path, document: dict[str, Any]) -> list[int]:
    shard_id = int(Path(document["tar"]).stem[-5:])
    with ShardSamples(folder, need_plan(folder).spec, shard_id) as samples:
        return [int(each) for each in samples.ids(document["sample"])]


@pytest.mark.parametrize("name", FORMS)
def test_the_documents_that_it_names_are_those_that_two_ranks_got(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder, options = folders[FORMS[name][0]], FORMS[name][1]
    with load(folder, **options) as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_at(STEP + 2)))
    told: dict[tuple[int, int, int], list[dict[str, Any]]] = defaultdict(list)
    for each in answer(folder, "--state", tmp_path / "state.json", "--step", STEP)["documents"]:
        told[each["rank"], each["batch"], each["row"]].append(each)
    got = trained(folder, options, STEP)
    assert len(got) == (32 if name == "batches grow" else 16)
    assert set(told) == set(got)
    eos = need_plan(folder).tokenizer.eos_token_id
    for place, documents in told.items():
        row = got[place]
        if FORMS[name][0] != "documents":  # the row is a stored one, and its documents are numbered in it
            assert {(each["tar"], each["sample"]) for each in documents} == {
                (documents[0]["tar"], documents[0]["sample"])
            }
            assert stored_ids(folder, documents[0]) == row
            assert [each["document"] for each in documents] == list(range(len(documents)))
            continue
        ends = [*(each["token"] for each in documents[1:]), len(row)]
        for each, end in zip(documents, ends, strict=True):
            piece, whole = row[each["token"] : end], stored_ids(folder, each)
            if name == "packed at load":  # EOS is put behind documents, which the shards have not
                piece = [token for token in piece if token != eos]
                assert str(piece)[1:-1] in str(whole)[1:-1]
            else:
                assert piece == whole[: options.get("max_length")]


def test_a_place_is_the_line_of_the_input_that_stands_there_and_peek_takes_the_address(
    folders: dict[str, Path], sample_dir: Path, tmp_path: Path
) -> None:
    folder = folders["documents"]
    with load(folder) as loader:
        tokenizer = loader.tokenizer
        (tmp_path / "state.json").write_text(json.dumps(loader.state_at(1)))
    documents = answer(folder, "--state", tmp_path / "state.json")["documents"]
    for each in documents[:3]:
        path, offset = each["place"].split(" byte ")
        line = (sample_dir / path).read_bytes()[int(offset) :].split(b"\n")[0].decode().strip()
        assert tokenizer.encode(line) == stored_ids(folder, each)
        assert main(["peek", str(folder), each["address"]]) == 0
    code, text = where(folder, "--state", tmp_path / "state.json")
    assert code == 0
    assert all(each["address"] in text and each["place"] in text for each in documents)


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_a_state_is_found_in_a_checkpoint_and_the_last_step_before_it_is_told(
    folders: dict[str, Path], tmp_path: Path, suffix: str
) -> None:
    folder, path = folders["documents"], tmp_path / f"checkpoint{suffix}"
    with load(folder, max_length=30) as loader:
        state = {"model": {"weight": [1.0]}, "extra": [{"loader": loader.state_at(4)}]}
    if suffix == ".pt":
        torch.save(state, path)
    else:
        path.write_text(json.dumps(state))
    last = answer(folder, "--state", path)
    assert (last["step"], last["epoch"], last["step_of_epoch"]) == (3, 0, 3)
    assert last == answer(folder, "--state", path, "--step", 3)


def test_what_cannot_be_answered_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["documents"]
    torch.save({"model": 1}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"nothing that torch wrote")
    with load(folder) as loader:
        state = loader.state_at(4)
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "damaged.json").write_text(json.dumps({**state, "layout": 3}))
    assert where(folder, "--state", tmp_path / "none.pt")[0] == 66
    assert where(folder, "--state", tmp_path / "a.pt")[0] == 66
    assert where(folder, "--state", tmp_path / "b.pt")[0] == 65
    assert where(folder, "--state", tmp_path / "damaged.json")[0] == 65
    assert where(folder, "--state", tmp_path / "state.json", "--step", "-1")[0] == 2
    assert where(folders["packed"], "--state", tmp_path / "state.json")[0] == 78
