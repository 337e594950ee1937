"""``shardprep where``: it names what a run of two ranks really saw, and finds a document's steps again."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from loader import TokenLoader, get_llama3_dataloader
from preprocess.plan.plan_file import need_plan
from shardprep.__main__ import main
from shardprep.format.shards import ShardSamples

if TYPE_CHECKING:
    from tests.conftest import Prep

BATCH, RANKS, STEP = 4, 2, 3
MICRO_BATCHES = 2  # of the 16 samples of a step
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("documents", {}),
    "truncated": ("documents", {"max_length": 30}),
    "grouped": ("documents", {"group_by_length": 4}),
    "not shuffled": ("documents", {"shuffle": False}),
    "packed at load": ("documents", {"seq_len": 64}),
    "packed": ("packed", {}),
    "one side": ("documents", {"split": "train", "validation_fraction": 0.2}),
    "planned side": ("sides", {"split": "train"}),
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


def flags(options: dict[str, Any]) -> list[str]:
    found = ["--batch_size", str(BATCH), "--global_batch_size", "16", "--world_size", "2", "--seed", "5"]
    for name, value in options.items():
        found += ["--no-shuffle"] if name == "shuffle" else [f"--{name}", str(value)]
    return found


def trained(folder: Path, options: dict[str, Any], step: int) -> dict[tuple[int, int, int], list[int]]:
    """The ids of each row of a step, without padding, by (rank, batch, row)."""
    found = {}
    for rank in range(RANKS):
        with load(folder, rank, **options) as loader:
            loader.load_state_dict(loader.state_at(step))
            for batch_number, batch in zip(range(2), loader, strict=False):
                for row, (ids, mask) in enumerate(
                    zip(batch["input_ids"], batch["attention_mask"], strict=True)
                ):
                    found[rank, batch_number, row] = ids[: int(mask.sum())].tolist()
    return found


def stored_ids(folder: Path, part: dict[str, Any]) -> list[int]:
    shard_id = int(Path(part["tar"]).stem[-5:])
    with ShardSamples(folder, need_plan(folder).spec, shard_id) as samples:
        ids = samples.ids(part["number"])[part["first_token"] :][: part["num_tokens"]]
    return [int(each) for each in ids]


@pytest.mark.parametrize("name", FORMS)
def test_the_documents_that_it_names_are_those_that_two_ranks_got(
    folders: dict[str, Path], name: str
) -> None:
    folder, options = folders[FORMS[name][0]], FORMS[name][1]
    told = answer(folder, "--step", STEP, *flags(options))
    seen = {
        (each["rank"], each["batch"], each["row"]): [stored_ids(folder, part) for part in each["parts"]]
        for each in told["samples"]
    }
    got = trained(folder, options, STEP)
    assert len(got) == 16
    assert set(seen) == set(got)
    for place, parts in seen.items():
        ids = [token for part in parts for token in part]
        if name == "packed at load":  # EOS is put behind documents, which the shards have not
            eos = need_plan(folder).tokenizer.eos_token_id
            assert [token for token in got[place] if token != eos] == ids
        else:
            assert got[place] == ids
    of_rank = answer(folder, "--step", STEP, "--rank", 1, *flags(options))
    assert of_rank["samples"] == [each for each in told["samples"] if each["rank"] == 1]


def log_batches(folder: Path, options: dict[str, Any], first: int, rank: int, log: Path) -> None:
    """What a training script of one rank may log: each row's hash, step by step, across an epoch's end."""
    with log.open("w") as file, load(folder, rank, **options) as loader:
        loader.load_state_dict(loader.state_at(first))
        step, batch_number = first, 0
        while step < first + 2:
            for batch in loader:
                rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
                for row, (ids, mask) in enumerate(rows):
                    sha = sha_of(ids[: int(mask.sum())].tolist())
                    file.write(json.dumps([step, rank, batch_number, row, sha]) + "\n")
                batch_number += 1
                if batch_number == MICRO_BATCHES:
                    step, batch_number = step + 1, 0
                if step == first + 2:
                    break


def sha_of(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


@pytest.mark.parametrize("name", ["packed", "padded", "grouped", "packed at load"])
def test_where_and_find_agree_with_the_hashes_that_a_run_of_two_ranks_logged(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder, options = folders[FORMS[name][0]], FORMS[name][1]
    with load(folder, **options) as loader:
        first = loader.order.steps_per_epoch - 1  # the last step of an epoch, and the first of the next
    logs = [tmp_path / f"rank {rank}.jsonl" for rank in range(RANKS)]
    for rank, log in enumerate(logs):
        log_batches(folder, options, first, rank, log)
    logged = {
        tuple(place): sha
        for log in logs
        for *place, sha in map(json.loads, log.read_text(encoding="utf-8").splitlines())
    }
    assert len(logged) == 16 * 2

    eos = need_plan(folder).tokenizer.eos_token_id
    of_document: dict[str, list[tuple[int, ...]]] = {}
    for step in range(first, first + 2):
        samples = answer(folder, "--step", step, *flags(options))["samples"]
        assert len(samples) == 16
        for each in samples:
            place = (step, each["rank"], each["batch"], each["row"])
            assert logged[place] in hashes_of(folder, each, eos if name == "packed at load" else None)
            for part in each["parts"]:
                of_document.setdefault(part["place"], []).append(place)

    for document in list(of_document)[::60]:
        path, offset = document.split(" byte ")
        seen = answer(folder, "--find", f"{path}:{offset}", "--epochs", 2, *flags(options))["seen"]
        found = {(each["step"], each["rank"], each["batch"], each["row"]) for each in seen}
        assert set(of_document[document]) <= found
        assert {place for place in found if place in logged} == set(of_document[document])


def hashes_of(folder: Path, sample: dict[str, Any], eos: int | None) -> set[str]:
    """Of the ids that a sample's parts name; with ``eos`` behind each, which a row's edge may cut off."""
    parts = [stored_ids(folder, part) for part in sample["parts"]]
    if eos is None:
        return {sha_of([token for part in parts for token in part])}
    joined = [token for part in parts for token in (*part, eos)]
    rows = [joined, joined[:-1], [eos, *joined], [eos, *joined[:-1]]]
    return {sha_of(row) for row in rows}


@pytest.mark.parametrize("name", FORMS)
def test_find_gives_the_steps_in_which_a_named_document_comes(folders: dict[str, Path], name: str) -> None:
    folder, options = folders[FORMS[name][0]], FORMS[name][1]
    told = answer(folder, "--step", STEP, *flags(options))
    sample = told["samples"][5]
    path, offset = sample["parts"][0]["place"].split(" byte ")
    found = answer(folder, "--find", f"{path}:{int(offset) + 1}", *flags(options))["seen"]
    here = {name: sample[name] for name in ("rank", "batch", "row")} | {"step": STEP, "order_step": STEP}
    assert here in found
    part = sample["parts"][0]
    address = f"{int(Path(part['tar']).stem.removeprefix('shard-'))}:{part['number']}"
    assert here in answer(folder, "--find", address, *flags(options))["seen"]
    for each in found[:3]:
        again = answer(folder, "--step", each["order_step"], *flags(options))["samples"]
        places = [part["place"] for s in again if s["row"] == each["row"] for part in s["parts"]]
        assert f"{path} byte {offset}" in places or FORMS[name][0] == "packed"


def test_a_place_is_the_line_of_the_input_that_stands_there(
    folders: dict[str, Path], sample_dir: Path
) -> None:
    folder = folders["documents"]
    for each in answer(folder, "--step", 0, *flags({}))["samples"]:
        (part,) = each["parts"]
        path, offset = part["place"].split(" byte ")
        line = (sample_dir / path).read_bytes()[int(offset) :].split(b"\n")[0].decode().strip()
        with load(folder) as loader:
            assert loader.tokenizer.encode(line) == stored_ids(folder, part)
        break


@pytest.mark.slow
def test_a_text_is_found_in_documents_and_in_packed_rows(folders: dict[str, Path]) -> None:
    for name in ("documents", "packed"):
        with load(folders[name]) as loader:
            batch = next(iter(loader))
            text = loader.tokenizer.decode(batch["input_ids"][1][3:14]).strip("\ufffd")
        found = answer(folders[name], "--find", text, *flags({}))
        places = [(each["step"], each["rank"], each["batch"], each["row"]) for each in found["seen"]]
        assert (0, 0, 0, 1) in places
    code, text = where(folders["packed"], "--find", "no such text anywhere", *flags({}))
    assert (code, "no document has it" in text) == (66, True)


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_a_checkpoints_state_gives_the_settings_the_step_and_what_was_skipped(
    folders: dict[str, Path], tmp_path: Path, suffix: str
) -> None:
    folder, path = folders["documents"], tmp_path / f"checkpoint{suffix}"
    with load(folder, max_length=30) as loader:
        loader.load_state_dict(loader.state_at(2))
        loader.skip(3)
        state = {"model": {"weight": [1.0]}, "extra": [{"loader": loader.state_at(4)}]}
    if suffix == ".pt":
        torch.save(state, path)
    else:
        path.write_text(json.dumps(state))
    last = answer(folder, "--state", path)
    assert (last["step"], last["step_of_epoch"]) == (3, 6)
    by_flags = answer(folder, "--step", 6, *flags({"max_length": 30}))
    assert last["samples"] == by_flags["samples"]
    skipped = answer(folder, "--step", 3, *flags({"max_length": 30}))["samples"][0]["parts"][0]["place"]
    path_, offset = skipped.split(" byte ")
    (seen,) = answer(folder, "--find", f"{path_}:{offset}", "--state", path)["seen"]
    assert (seen["order_step"], seen["step"]) == (3, None)


@pytest.mark.parametrize(
    ("given", "code", "what"),
    [
        ([], 2, "nothing is asked"),
        (["--step", "0"], 2, "--global_batch_size is needed"),
        (["--step", "-1", "--global_batch_size", "4"], 2, "expected a step from 0"),
        (["--step", "0", "--global_batch_size", "4", "--rank", "1"], 2, "the ranks are 0 to 0"),
        (["--find", "none.txt:3", "--global_batch_size", "4"], 66, "no data set here has an input none.txt"),
        (["--state", "none.pt"], 66, "is no file"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    folders: dict[str, Path], given: list[str], code: int, what: str
) -> None:
    found, text = where(folders["documents"], *given)
    assert (found, what in text) == (code, True), text


def test_a_file_without_a_state_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    torch.save({"model": 1}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"nothing that torch wrote")
    assert where(folders["documents"], "--state", tmp_path / "a.pt")[0] == 66
    assert where(folders["documents"], "--state", tmp_path / "b.pt")[0] == 65
