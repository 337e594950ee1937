"""``shardprep rewrite``: the data set as if the withdrawn documents had never been in its input."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from loader import get_llama3_dataloader
from shardprep.format.idx import read_idx
from shardprep.format.manifest import read_manifest
from shardprep.format.plan import need_plan
from tests.killed_calls import killed_at

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes  # rewrite has workers

WITHDRAWN = {"b/1", "b/2", "b/29", "d/0", "d/17"}
FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "id_field": "id", "hash_inputs": True},
    "concat": {"record": "packed", "seq_len": 32},
    "best_fit": {"record": "packed", "seq_len": 32, "pack": "best_fit"},
    "sides": {"record": "packed", "seq_len": 32, "validation_fraction": 0.3},
}
_OF_INPUT = {"input_bytes", "sources"}  # of the counts: bytes of the input, which still has the documents


def write_raw(folder: Path, *, without: frozenset[str] | set[str] = frozenset()) -> Path:
    """Four files of 30 documents, with empty and bad lines between them."""
    folder.mkdir()
    for name in "abcd":
        lines = []
        for number in range(30):
            text = f"{name} {number} " + "kettle sings, nobody's " * (number * 7 % 11)
            if f"{name}/{number}" not in without:
                lines.append(json.dumps({"id": f"{name}/{number}", "text": text}))
            lines += ["", "no JSON"] * (number % 10 == 4)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def made(prep: Prep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of each form, a shard for each file, with documents withdrawn of b and d."""
    root = tmp_path_factory.mktemp("made")
    raw = write_raw(root / "raw")
    sums = root / "ids"
    sums.write_text("\n".join(WITHDRAWN))
    for name, options in FORMS.items():
        prep.plan(raw, root / name, max_bad_fraction=0.5, **{"id_field": "id", **options})
        prep.make(root / name)
        assert prep.command("withdraw", root / name, "--ids", sums).code == 0
    return root


def counts_of(folder: Path, shard_id: int) -> Mapping[str, Any]:
    counts = dataclasses.asdict(read_manifest(folder, shard_id).counts)
    return {name: value for name, value in counts.items() if name not in _OF_INPUT}


@pytest.mark.parametrize("form", FORMS)
def test_it_equals_a_data_set_whose_input_lacks_them(
    prep: Prep, made: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, link = tmp_path / "new", os.link

    def refuse_tars(source: Path, target: Path) -> None:
        if source.suffix == ".tar":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        link(source, target)

    if form == "npy":  # as on another file system
        monkeypatch.setattr(os, "link", refuse_tars)
    ended = prep.command("rewrite", made / form, "--output_dir", new, "--num_proc", 1)
    assert ended.code == 0, ended.text
    assert "2 of 4 shards hold nothing withdrawn" in ended.text
    write_raw(tmp_path / "raw", without=WITHDRAWN)
    expected = tmp_path / "expected"
    prep.plan(tmp_path / "raw", expected, max_bad_fraction=0.5, **{"id_field": "id", **FORMS[form]})
    prep.make(expected)
    for shard_id in range(4):
        name = f"shard-{shard_id:05d}.tar"
        assert (new / name).read_bytes() == (expected / name).read_bytes()
        assert counts_of(new, shard_id) == counts_of(expected, shard_id)
        records, wanted = (read_idx(each, need_plan(each).spec, shard_id) for each in (new, expected))
        names = [column for column in records.dtype.names or () if column != "source_offset"]
        assert all(np.array_equal(records[column], wanted[column]) for column in names)
        is_same_file = (new / name).stat().st_ino == (made / form / name).stat().st_ino
        assert is_same_file == (shard_id in (0, 2) and form != "npy")
        digests = Path("digests", f"shard-{shard_id:05d}.digests")
        assert form != "sides" or (new / digests).read_bytes() == (expected / digests).read_bytes()
    ids = [path.read_bytes() for path in sorted((expected / "ids").iterdir())]
    kept = [[json.loads(line)[2] for line in each.splitlines()] for each in ids]
    ids = [path.read_bytes() for path in sorted((new / "ids").iterdir())]
    assert [[json.loads(line)[2] for line in each.splitlines()] for each in ids] == kept
    assert prep.command("verify", new, "--deep", 4).code == 0
    for folder, code in ((made / form, 78), (new, 0)):
        words = ["--to", "nanogpt", "--output_dir", tmp_path / f"export {folder.name} {code}"]
        assert prep.command("export", folder, *words).code == code
    first, second = (
        [batch["input_ids"] for batch in get_llama3_dataloader(each, 2, num_workers=0, shuffle=False)]
        for each in (new, expected)
    )
    assert all(np.array_equal(ids, wanted) for ids, wanted in zip(first, second, strict=True))


def test_documents_can_be_withdrawn_of_a_rewritten_data_set(prep: Prep, made: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert prep.command("rewrite", made / "best_fit", "--output_dir", new, "--num_proc", 1).code == 0
    (tmp_path / "ids").write_text("b/3\nb/1\n")
    ended = prep.command("withdraw", new, "--ids", tmp_path / "ids")
    assert (ended.code, "not found: b/1" in ended.text) == (66, True)
    ended = prep.command("rewrite", new, "--output_dir", tmp_path / "newer")
    assert (ended.code, "made by rewrite itself" in ended.text) == (2, True)
    assert not (tmp_path / "newer").exists()


def test_what_cannot_be_rewritten_is_refused(prep: Prep, made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "json", tmp_path / "json"))
    shutil.rmtree(folder / "withdrawn")
    ended = prep.command("rewrite", folder, "--output_dir", tmp_path / "new")
    assert (ended.code, "nothing is withdrawn" in ended.text) == (2, True)
    assert prep.command("rewrite", made / "json", "--output_dir", tmp_path / "new", "--num_proc", 1).code == 0
    (tmp_path / "ids").write_text("b/3\n")
    shutil.copytree(made / "json" / "withdrawn", folder / "withdrawn")
    assert prep.command("withdraw", folder, "--ids", tmp_path / "ids").code == 0
    ended = prep.command("rewrite", folder, "--output_dir", tmp_path / "new")
    assert (ended.code, "has another plan" in ended.text) == (78, True)
    (tmp_path / "new" / "left_out" / "0001.json").unlink()
    (tmp_path / "new" / "shard-00001.json").unlink()
    ended = prep.command("run", tmp_path / "new", "--num_proc", 1)
    assert (ended.code, "bring the folder back" in ended.text) == (65, True)


def test_a_kill_at_any_call_leaves_nothing_half_done(prep: Prep, made: Path, tmp_path: Path) -> None:
    """At every fifth call, and after every third kill the command goes on to the end."""
    data, new, whole = made / "concat", tmp_path / "new", tmp_path / "whole"
    words = ["rewrite", str(data), "--num_proc", "1", "--output_dir"]
    assert prep.command(*words, whole).code == 0
    expected, number, num_kills = prep.contents(whole), 1, 0
    before = prep.contents(data)
    while True:
        status = killed_at(number, [*words, str(new)])
        if os.WIFEXITED(status):
            break
        num_kills += 1
        number += 5
        for path in new.glob("shard-?????.json"):  # what counts as done is whole
            found = {name: raw for name, raw in prep.contents(new).items() if path.stem in name}
            assert found.items() <= expected.items()
        if num_kills % 3 == 0:
            assert prep.command(*words, new).code == 0
            assert prep.contents(new) == expected
            shutil.rmtree(new)
    assert os.WEXITSTATUS(status) == 0
    assert num_kills > 10
    assert prep.contents(new) == expected
    assert prep.contents(data) == before
