"""``shardprep withdraw``: the documents that are asked for are in a list, which is whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardprep.format.plan import need_plan
from shardprep.format.withdrawals import publish_withdrawal, read_withdrawals, withdrawal_path
from tests.conftest import seal
from tests.killed_calls import killed_at

if TYPE_CHECKING:
    from tests.conftest import Prep

NUM_SHARDS = 3
FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy"},
    "inputs": {"token_format": "npy", "keep_text": False},
    "concat": {"record": "packed", "seq_len": 32},
    "labels": {"source_field": "label"},
    "hashed": {"record": "packed", "seq_len": 32, "hash_inputs": True},
    "digests": {"validation_fraction": 0.3},
    "rows": {"record": "packed", "seq_len": 32, "validation_fraction": 0.3, "pack": "best_fit"},
}


@pytest.fixture(scope="module")
def made(prep: Prep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 documents of two sources; two have one text. Empty ones and one that is no JSON are left out."""
    root = tmp_path_factory.mktemp("made")
    for source in ("books", "web"):
        (root / "raw" / source).mkdir(parents=True)
        lines = []
        for number in range(45):
            text = f"{source} {min(number, 43)} " + "sings, kettle " * (min(number, 43) % 9)
            lines += [json.dumps({"id": f"{source}/{number}", "text": text, "label": f"label{number % 4}"})]
            lines += ["", "no JSON"] * (number % 21 == 0 and source == "web")
        (root / "raw" / source / "all.jsonl").write_text("\n".join(lines) + "\n")
    common: dict[str, Any] = {"recursive": True, "id_field": "id", "max_bad_fraction": 0.5}
    forms = {name: {**common, **options} for name, options in FORMS.items()}
    return prep.make_forms(root / "raw", root, forms, num_shards=NUM_SHARDS)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda form: Path(shutil.copytree(made / form, tmp_path / form))


def texts_of(prep: Prep, made: Path) -> list[list[str]]:
    """The texts of each shard, in order, as the tars have them."""
    tars = [made / "json" / f"shard-{number:05d}.tar" for number in range(NUM_SHARDS)]
    return [[raw.decode() for name, raw in prep.members(tar) if name.endswith(".text.txt")] for tar in tars]


def withdrawn(folder: Path) -> dict[int, list[int]]:
    lists = read_withdrawals(folder, need_plan(folder).plan_id)
    return {shard_id: lists.documents_of(shard_id).tolist() for shard_id in lists.shard_ids}


def numbers_of(texts: list[list[str]], is_asked: Callable[[str], bool]) -> dict[int, list[int]]:
    found = {
        shard_id: [number for number, text in enumerate(of_shard) if is_asked(text)]
        for shard_id, of_shard in enumerate(texts)
    }
    return {shard_id: numbers for shard_id, numbers in found.items() if numbers}


@pytest.mark.parametrize("form", ["json", "npy", "inputs", "concat", "hashed", "digests", "rows"])
def test_documents_are_found_by_the_sha256_of_their_text(
    prep: Prep, made: Path, folder: Callable[[str], Path], form: str, tmp_path: Path
) -> None:
    data, texts = folder(form), texts_of(prep, made)
    asked = {texts[0][3], texts[1][0], texts[-1][-1]}
    lines = [f"{hashlib.sha256(text.encode()).hexdigest()}  a/name.txt\n" for text in sorted(asked)]
    (tmp_path / "sums").write_text("".join(lines) + "f" * 64 + "\n")
    ended = prep.command("withdraw", data, "--sha256", tmp_path / "sums", "--reason", "asked for")
    assert ended.code == 66
    assert f"not found: {'f' * 32}..." in ended.text
    assert "1 of 4 were not found" in ended.text
    assert withdrawn(data) == numbers_of(texts, asked.__contains__)
    assert sum(map(len, withdrawn(data).values())) == 4  # one text is that of two documents
    assert "4 documents withdrawn by" in ended.text
    assert json.loads(withdrawal_path(data, 1).read_bytes())["reason"] == "asked for"


@pytest.mark.parametrize("form", [*FORMS])
def test_documents_are_found_by_id(
    prep: Prep, made: Path, folder: Callable[[str], Path], form: str, tmp_path: Path
) -> None:
    data, texts = folder(form), texts_of(prep, made)
    (tmp_path / "ids").write_text("books/7\n\nweb/12\nweb/0\n")
    ended = prep.command("withdraw", data, "--ids", tmp_path / "ids")
    assert ended.code == 0, ended.text
    asked = ("books 7 ", "web 12 ", "web 0 ")
    assert withdrawn(data) == numbers_of(texts, lambda text: f"{text} ".startswith(asked))
    (tmp_path / "ids").write_text("books/7\nbooks/8\n")
    assert "1 document withdrawn by" in prep.command("withdraw", data, "--ids", tmp_path / "ids").text
    again = prep.command("withdraw", data, "--ids", tmp_path / "ids")
    assert again.code == 0
    assert "no list was written" in again.text
    assert prep.names(data / "withdrawn") == ["0001.json", "0002.json"]


@pytest.mark.parametrize("form", ["json", "concat", "labels"])
def test_documents_are_found_by_source(
    prep: Prep, made: Path, folder: Callable[[str], Path], form: str
) -> None:
    data, texts = folder(form), texts_of(prep, made)
    name = "label2" if form == "labels" else "books"
    before = {path: path.stat().st_mtime_ns for path in data.glob("shard-*")}
    assert prep.command("withdraw", data, "--source", name).code == 0
    labels = {
        record["text"].strip(): record["label"]
        for path in (made / "raw").rglob("*.jsonl")
        for record in map(
            json.loads, filter(lambda line: line.startswith("{"), path.read_text().splitlines())
        )
        if not record["id"].endswith("/43")  # of which label is its text, which 44 has, too
    }
    if form == "labels":
        expected = numbers_of(texts, lambda text: labels.get(text.strip()) == name)
        found = withdrawn(data)
        assert {shard: sorted({*expected.get(shard, []), *found[shard]}) for shard in found} == found
        assert sum(map(len, found.values())) - sum(map(len, expected.values())) <= 2
    else:
        assert withdrawn(data) == numbers_of(texts, lambda text: text.startswith("books"))
    assert {path: path.stat().st_mtime_ns for path in data.glob("shard-*")} == before
    ended = prep.command("withdraw", data, "--source", "nobody")
    assert (ended.code, "not found: nobody" in ended.text) == (66, True)


@pytest.mark.parametrize("form", [*FORMS])
def test_documents_are_found_at_their_addresses(
    prep: Prep, made: Path, folder: Callable[[str], Path], form: str
) -> None:
    """Addresses are read off what peek shows, and off the bytes of the input."""
    data, texts = folder(form), texts_of(prep, made)
    if (
        form == "inputs"
    ):  # the tars have no text, and peek decodes ids: addresses in shards are those of "npy"
        shown = prep.command("peek", made / "npy", "--num", 1000, "--chars", 0).text
    else:
        shown = prep.command("peek", data, "--num", 1000, "--chars", 0).text
    asked: dict[str, str] = {}  # address -> how the text begins
    for sample in re.findall(
        r"^shard-(\d+) (?:row|document) (\d+):(.*?)\n\n", shown, re.MULTILINE | re.DOTALL
    ):
        shard_id, number, lines = int(sample[0]), int(sample[1]), sample[2]
        parts = re.split(r"\n  ---", lines)[1:] or [lines]
        for document, part in enumerate(parts):
            is_row = "---" in lines  # whose end may cut a number
            begin = re.search(rf"\b(books|web) (\d+)(?= |⟦{'' if is_row else '|$'})", part, re.MULTILINE)
            if begin and int(begin[2]) < 43 and (not is_row or part.startswith(" a document begins")):
                asked[f"{shard_id}:{number}:{document}" if is_row else f"{shard_id}:{number}"] = begin[0]
    assert len(asked) > 50
    chosen = [*asked][3::11]
    raw = (made / "raw" / "web" / "all.jsonl").read_bytes()
    place = raw.index(b'"text": "web 21 ')  # within its line, which begins before
    names = [f"{asked[address]} " for address in chosen] + ["web 21 ", "books 33 "]
    ended = prep.command("withdraw", data, "--at", *chosen, f"web/all.jsonl:{place}", "id:books/33")
    assert ended.code == 0, ended.text
    assert f"no document begins at web/all.jsonl:{place}: the last one before is taken, at web/" in ended.text
    assert withdrawn(data) == numbers_of(texts, lambda text: f"{text} ".startswith(tuple(names)))
    for address, words in (
        (f"web/all.jsonl:{raw.index(b'no JSON')}", "was left out of shard"),
        ("0:99999", "has samples 0 to"),
        ("0:0:999", "documents 0 to" if "record" in FORMS[form] else "is one document, 0"),
        ("nothing", "is no address"),
        ("9:0", "expected ids of 0 to 2"),
        ("missing.jsonl:0", "is no input of the plan"),
        ("id:books/333", "has the id books/333"),
        ("id:", "names no id"),
    ):
        ended = prep.command("withdraw", data, "--at", address)
        assert ended.code in {2, 66}, address
        assert words in ended.text
    assert prep.names(data / "withdrawn") == ["0001.json"]


def test_what_cannot_be_asked_is_refused_in_words(
    prep: Prep, made: Path, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    data = folder("inputs")
    (tmp_path / "sums").write_text("abc\n")
    ended = prep.command("withdraw", data, "--sha256", tmp_path / "sums")
    assert (ended.code, "sums:1 begins 'abc', expected 64 hex digits" in ended.text) == (65, True)
    assert prep.command("withdraw", data, "--ids", tmp_path / "none").code == 66
    assert prep.command("withdraw", data).code == 2
    (tmp_path / "sums").write_text("0" * 64 + "\n")
    moved = tmp_path / "moved"
    shutil.copytree(made / "raw", moved)
    path = moved / "web" / "all.jsonl"
    path.write_text(path.read_text().replace('{"id"', '{"no"', 1).replace('"text"', '"txet"', 1))
    ended = prep.command("withdraw", data, "--sha256", tmp_path / "sums", "--input_dir", moved)
    assert (ended.code, "changed since" in ended.text) == (78, True)
    (data / "shard-00001.json").unlink()
    assert prep.command("withdraw", data, "--source", "web").code == 66
    assert not (data / "withdrawn").exists()
    plain = tmp_path / "plain"
    prep.plan(made / "raw", plain, num_shards=1, recursive=True, max_bad_fraction=0.5)
    assert "--id_field" in (ended := prep.command("withdraw", plain, "--ids", tmp_path / "sums")).text
    assert ended.code == 2


def test_a_list_that_is_altered_missing_or_of_other_data_is_refused(
    prep: Prep, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    data, other = folder("json"), folder("npy")
    for number in range(3):
        (tmp_path / "ids").write_text(f"web/{number}\n")
        for each in (data, other):
            assert prep.command("withdraw", each, "--ids", tmp_path / "ids").code == 0
    lists = [withdrawal_path(data, number) for number in (1, 2, 3)]
    contents = [path.read_bytes() for path in lists]

    def refusal(code: int) -> str:
        ended = prep.command("withdraw", data, "--source", "books")
        assert ended.code == code, ended.text
        for path, content in zip(lists, contents, strict=True):
            path.write_bytes(content)
        return ended.text

    lists[1].unlink()
    assert "has 0003.json and no 0002.json, expected every list from 0001 on; bring" in refusal(65)
    lists[0].unlink()
    assert "no 0001.json" in refusal(65)
    lists[1].write_bytes(contents[1].replace(b'"made": "2', b'"made": "3'))
    assert "0002.json was altered since it was written" in refusal(65)
    lists[1].write_bytes(contents[1].replace(b'"made": "2', b'"made": "3'))
    seal(lists[1])
    assert "0003.json follows a list of sha256" in refusal(65)
    lists[1].write_bytes(contents[1].replace(b'"made": "2', b'"made": "3'))
    assert prep.command("verify", data, "--fast").code == 65
    lists[1].write_bytes(contents[1])
    lists[2].write_bytes(contents[2][:40])
    assert "is not JSON" in refusal(65)
    shutil.copy(withdrawal_path(other, 3), lists[2])
    assert "move" in refusal(78)


def test_of_two_writers_one_is_first_and_the_other_looks_again(
    made: Path, folder: Callable[[str], Path]
) -> None:
    data = folder("json")
    plan_id = need_plan(data).plan_id
    before = read_withdrawals(data, plan_id)
    given: dict[str, Any] = {"plan_id": plan_id, "asked": "", "reason": ""}
    first, second = {0: np.array([1, 5])}, {0: np.array([2])}
    published = publish_withdrawal(data, before, documents=first, places=first, **given)
    assert publish_withdrawal(data, before, documents=second, places=second, **given) is None
    found = read_withdrawals(data, plan_id)
    assert published is not None
    assert published.sha256 == found.sha256
    assert withdrawn(data) == {0: [1, 5]}
    assert sorted(path.name for path in (data / "withdrawn").iterdir()) == ["0001.json"]


@pytest.mark.processes
def test_a_kill_at_any_call_leaves_a_whole_list_or_none(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    data = folder("concat")
    (tmp_path / "ids").write_text("web/3\nbooks/5\n")
    words = ["withdraw", str(data), "--ids", str(tmp_path / "ids")]
    number, found = 0, set()
    while True:
        number += 1
        status = killed_at(number, words)
        if os.WIFEXITED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        lists = read_withdrawals(data, need_plan(data).plan_id)
        found.add(lists.num_documents)
        assert lists.num_documents in (0, 2)
        if lists.lists:
            withdrawal_path(data, 1).unlink()
    assert os.WEXITSTATUS(status) == 0
    assert number > 10
    assert found == {0, 2}
    assert sum(map(len, withdrawn(data).values())) == 2


@pytest.mark.parametrize("form", ["npy", "concat", "digests"])
def test_lines_of_text_beside_records_with_ids_do_not_shift_them(
    prep: Prep, tmp_path: Path, form: str
) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.txt").write_text("".join(f"a line of text {number}\n" for number in range(20)))
    records = [json.dumps({"id": f"id{number}", "text": f"record {number}"}) for number in range(20)]
    (tmp_path / "raw" / "b.jsonl").write_text("\n".join(records))
    (tmp_path / "raw" / "c.txt").write_text("a last line of text\n")
    prep.plan(tmp_path / "raw", tmp_path / "data", num_shards=1, id_field="id", **FORMS[form])
    prep.make(tmp_path / "data")
    (tmp_path / "ids").write_text("id7\n")
    assert prep.command("withdraw", tmp_path / "data", "--ids", tmp_path / "ids").code == 0
    assert withdrawn(tmp_path / "data") == {0: [27]}
    assert prep.command("verify", tmp_path / "data", "--deep").code == 0
    # As versions before wrote it.
    path, manifest = tmp_path / "data" / "ids" / "shard-00000.jsonl", tmp_path / "data" / "shard-00000.json"
    old = b"".join(line for line in path.read_bytes().splitlines(keepends=True) if b'"id' in line)
    assert old.count(b"\n") == 20
    path.write_bytes(old)
    content = json.loads(manifest.read_bytes())
    content["ids"] = {"num_bytes": len(old), "sha256": hashlib.sha256(old).hexdigest()}
    manifest.write_text(json.dumps(content))
    seal(manifest)
    (tmp_path / "ids").write_text("id8\n")
    ended = prep.command("withdraw", tmp_path / "data", "--ids", tmp_path / "ids")
    assert (ended.code, "has 20 lines, expected one for each of 41 documents" in ended.text) == (78, True)
