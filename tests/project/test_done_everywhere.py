"""A shard that verify found wrong is done for nobody, and an error of reading says nothing of a shard."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loader import get_llama3_dataloader
from shardprep import files
from shardprep.errors import BrokenShard, OtherPlan, ReadWriteError, ShardprepError
from shardprep.format.names import manifest_path, tar_path
from tests.conftest import forge_shard, seal
from tests.slurm.fake_slurm import slurm, status

if TYPE_CHECKING:
    from tests.conftest import Prep

WRONG = 1  # the shard that is found wrong


def flip_id(folder: Path) -> None:
    """Flip a bit of a token id: of the same size, and it still is a list of ids."""
    tar = bytearray(tar_path(folder, WRONG).read_bytes())
    tar[tar.index(b"[", 512) + 1] ^= 1
    tar_path(folder, WRONG).write_bytes(tar)


@pytest.fixture
def whole_dir(made_dir: Path, tmp_path: Path, prep: Prep) -> Path:
    """A verified data set of 3 shards."""
    folder = Path(shutil.copytree(made_dir, tmp_path / "whole"))
    assert prep.command("verify", folder).code == 0
    return folder


@pytest.fixture
def wrong_dir(whole_dir: Path, prep: Prep) -> Path:
    """The same, with a flipped id that verify has found."""
    flip_id(whole_dir)
    assert prep.command("verify", whole_dir).code == 65
    return whole_dir


def load(folder: Path, shards: str = "") -> int:
    """Batches of an epoch."""
    with get_llama3_dataloader(str(folder / shards), batch_size=4, num_workers=0) as loader:
        return sum(1 for _ in loader)


def export(prep: Prep, to: str) -> Callable[[Path, Path], int]:
    return lambda data, out: prep.command("export", data, "--to", to, "--output_dir", out).code


@pytest.mark.parametrize("shards", ["", "shard-*.tar"])
def test_the_loader_refuses_a_shard_that_verify_found_wrong(wrong_dir: Path, shards: str) -> None:
    with pytest.raises(BrokenShard, match="00001"):
        load(wrong_dir, shards)


def test_the_loader_takes_the_other_shards_where_these_alone_are_named(wrong_dir: Path) -> None:
    assert load(wrong_dir, "shard-0000{0,2}.tar")


def test_an_index_beside_a_finding_changes_nothing(wrong_dir: Path, made_dir: Path, prep: Prep) -> None:
    """As where a verify was killed, or the index came back with a backup."""
    other = Path(shutil.copytree(made_dir, wrong_dir.parent / "other"))
    assert prep.command("verify", other).code == 0
    shutil.copy(other / "index.json", wrong_dir / "index.json")
    with pytest.raises(BrokenShard, match="00001"):
        load(wrong_dir)
    assert prep.command("export", wrong_dir, "--to", "nanogpt", "--output_dir", other / "out").code == 65


@pytest.mark.parametrize("to", ["nanogpt", "megatron", "hf"])
def test_export_refuses_a_shard_that_verify_found_wrong(
    wrong_dir: Path, tmp_path: Path, prep: Prep, to: str
) -> None:
    done = prep.command("export", wrong_dir, "--to", to, "--output_dir", tmp_path / "out")
    assert done.code == 65
    assert "00001" in done.text
    assert not list((tmp_path / "out").glob("*.bin")) + list((tmp_path / "out").glob("*.arrow"))


def test_stage_refuses_a_shard_that_verify_found_wrong(wrong_dir: Path, tmp_path: Path) -> None:
    from shardprep.__main__ import main

    assert main(["stage", str(wrong_dir), "--to", str(tmp_path / "staged")]) == 65
    assert not list(tmp_path.glob("staged/**/shard-00001.tar"))


def test_once_it_is_made_anew_everybody_takes_it(wrong_dir: Path, tmp_path: Path, prep: Prep) -> None:
    assert prep.command("--shard_id", WRONG, "--output_dir", wrong_dir).code == 0
    assert load(wrong_dir)
    assert export(prep, "nanogpt")(wrong_dir, tmp_path / "out") == 0
    assert prep.command("verify", wrong_dir).code == 0


@pytest.mark.parametrize("seed", range(6))
def test_no_flipped_bit_of_the_findings_makes_a_wrong_shard_count_as_done(
    wrong_dir: Path, tmp_path: Path, prep: Prep, seed: int
) -> None:
    path = wrong_dir / "findings.json"
    before = path.read_bytes()
    chance = random.Random(seed)
    for _ in range(8):
        place, bit = chance.randrange(len(before)), chance.randrange(8)
        path.write_bytes(before[:place] + bytes([before[place] ^ 1 << bit]) + before[place + 1 :])
        said = slurm_json(wrong_dir)
        assert said is None or said["done"] == "0,2", (place, bit)
        with pytest.raises(ShardprepError):
            load(wrong_dir)
        assert export(prep, "nanogpt")(wrong_dir, tmp_path / "out")
        manifest = manifest_path(wrong_dir, WRONG).read_bytes()
        code = prep.command("--shard_id", WRONG, "--output_dir", wrong_dir).code
        is_anew = manifest_path(wrong_dir, WRONG).read_bytes() != manifest
        assert (code == 0) == is_anew, (place, bit)
        assert not is_anew, "what cannot be read is no reason to make a shard again, either"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"findings": 3}', "\0" * 99])
def test_findings_that_cannot_be_read_are_refused_and_verify_writes_them_anew(
    wrong_dir: Path, prep: Prep, content: str
) -> None:
    (wrong_dir / "findings.json").write_text(content)
    assert slurm_json(wrong_dir) is None
    with pytest.raises(BrokenShard, match=r"findings\.json"):
        load(wrong_dir)
    fast = prep.command("verify", wrong_dir, "--fast")
    assert (fast.code, "findings.json" in fast.text) == (65, True), "it cannot know what is wrong"
    assert prep.command("verify", wrong_dir).code == 65
    assert status(wrong_dir)["wrong"] == "1"


def test_a_faster_verify_does_not_forget_what_a_thorough_one_found(wrong_dir: Path, prep: Prep) -> None:
    fast = prep.command("verify", wrong_dir, "--fast")
    assert (fast.code, "00001" in fast.text) == (65, True)
    assert not (wrong_dir / "index.json").exists()
    assert status(wrong_dir)["wrong"] == "1"


def test_what_deep_verify_found_stands_until_it_looks_again_or_the_shard_is_made_anew(
    whole_dir: Path, prep: Prep
) -> None:
    """Of another id, with right hashes: only the input tells that it is wrong."""
    good = tar_path(whole_dir, WRONG).read_bytes(), manifest_path(whole_dir, WRONG).read_bytes()
    flip_id(whole_dir)
    forge_shard(whole_dir, WRONG, tar=tar_path(whole_dir, WRONG).read_bytes())
    assert prep.command("verify", whole_dir).code == 0
    assert prep.command("verify", whole_dir, "--deep", 3).code == 65
    for words in ([], ["--fast"], ["--deep", 1]):
        assert prep.command("verify", whole_dir, *words).code == 65
        assert status(whole_dir)["wrong"] == "1"
    for path, content in zip((tar_path, manifest_path), good, strict=True):
        path(whole_dir, WRONG).write_bytes(content)
    assert prep.command("verify", whole_dir).code == 0, "it has another manifest"


def test_an_input_that_is_away_says_nothing_of_the_shard(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    raw = Path(shutil.copytree(sample_dir, tmp_path / "raw"))
    folder = tmp_path / "data"
    prep.plan(raw, folder, num_shards=2)
    prep.make(folder)
    raw.rename(tmp_path / "moved")
    assert prep.command("verify", folder, "--deep", 2).code
    assert not (folder / "findings.json").exists()
    assert status(folder)["done"] == "0-1"


def test_a_bit_of_a_manifest_is_no_done_shard_for_anybody(
    whole_dir: Path, tmp_path: Path, prep: Prep
) -> None:
    """Of what is left where its hash is wrong: its sizes and its plan are right."""
    path = manifest_path(whole_dir, WRONG)
    text = path.read_text()
    path.write_text(text.replace('"num_tokens": ', '"num_tokens": 1', 1))
    assert status(whole_dir)["done"] == "0,2"
    assert export(prep, "nanogpt")(whole_dir, tmp_path / "out") == 65
    (whole_dir / "index.json").unlink()
    with pytest.raises(BrokenShard, match="altered"):
        load(whole_dir)


def test_shards_of_another_plan_are_refused_by_the_loader_as_by_the_others(
    made_dir: Path, whole_dir: Path, tmp_path: Path, prep: Prep, sample_dir: Path
) -> None:
    prep.plan(sample_dir, tmp_path / "other", num_shards=3, append_eos=True)
    shutil.copy(tmp_path / "other" / "plan.json", whole_dir / "plan.json")
    assert status(whole_dir)["done"] == ""
    with pytest.raises(OtherPlan):
        load(whole_dir)


def slurm_json(folder: Path) -> dict[str, Any] | None:
    """What ``status --json`` says, None where it refuses the findings."""
    try:
        return status(folder)
    except AssertionError:
        slurm("status", folder, code=65)
        return None


# Errors of reading. ---------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``failing("shard-00001.tar", EIO, times=1)``: opening files of that name fails, so often."""
    monkeypatch.setattr(files, "RETRY_DELAYS_S", (0, 0))

    def apply(name: str, code: int, *, times: int = 10**9) -> None:
        real, left = os.open, [times]

        def opened(path: Any, *args: Any, **kwargs: Any) -> int:
            if Path(os.fspath(path)).name == name and left[0]:
                left[0] -= 1
                raise OSError(code, os.strerror(code), os.fspath(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", opened)

    yield apply
    monkeypatch.undo()


ERRORS = ("EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "EACCES", "ETIMEDOUT", "ENODEV")


@pytest.mark.parametrize("name", ["shard-00001.tar", "shard-00001.idx", "shard-00001.json"])
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_reading_says_nothing_of_the_shard(
    whole_dir: Path, prep: Prep, failing: Callable[..., None], error: str, name: str
) -> None:
    before = (whole_dir / "index.json").read_bytes()
    failing(name, getattr(errno, error))
    verified = prep.command("verify", whole_dir)
    assert (verified.code, name in verified.text) == (74, True)
    assert not (whole_dir / "findings.json").exists()
    assert (whole_dir / "index.json").read_bytes() == before


@pytest.mark.parametrize("error", ["EIO", "ESTALE", "EMFILE", "ENFILE", "ETIMEDOUT"])
def test_an_error_that_goes_away_is_tried_again(
    whole_dir: Path, prep: Prep, failing: Callable[..., None], error: str
) -> None:
    failing("shard-00001.tar", getattr(errno, error), times=1)
    assert prep.command("verify", whole_dir).code == 0


def test_what_is_wrong_is_written_though_another_shard_cannot_be_read(
    whole_dir: Path, prep: Prep, failing: Callable[..., None]
) -> None:
    flip_id(whole_dir)
    failing("shard-00002.tar", errno.EIO)
    assert prep.command("verify", whole_dir).code == 65
    assert sorted(
        each["shard"] for each in json.loads((whole_dir / "findings.json").read_text())["findings"]
    ) == [WRONG]


def test_a_finding_of_a_shard_that_cannot_be_read_now_stands(
    wrong_dir: Path, prep: Prep, failing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing("shard-00001.tar", errno.EIO)
    assert prep.command("verify", wrong_dir).code == 74
    monkeypatch.undo()
    assert status(wrong_dir)["wrong"] == "1"


@pytest.mark.parametrize("error", ["EIO", "EACCES", "EMFILE"])
def test_a_manifest_that_cannot_be_read_is_no_missing_shard(
    whole_dir: Path, prep: Prep, failing: Callable[..., None], error: str
) -> None:
    failing("shard-00001.json", getattr(errno, error))
    assert "shard-00001.json" in slurm("status", whole_dir, code=74)
    before = tar_path(whole_dir, WRONG).stat().st_mtime_ns
    assert prep.command("run", whole_dir).code == 74
    assert tar_path(whole_dir, WRONG).stat().st_mtime_ns == before, "it is not made again"


def test_a_wrong_shard_whose_manifest_cannot_be_read_does_not_count_as_done(
    wrong_dir: Path, failing: Callable[..., None]
) -> None:
    failing("shard-00001.json", errno.EIO)
    slurm("status", wrong_dir, code=74)
    with pytest.raises(ReadWriteError):
        load(wrong_dir)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shard", "1"), ("shard", -1), ("shard", 2**70), ("shard", None), ("shard", True), ("shard", 1.0),
        ("exit_code", "65"), ("exit_code", None), ("message", 3), ("message", ["x"]), ("message", None),
        ("manifest_sha256", 7), ("manifest_sha256", "x"), ("check", "never"),
    ],
)  # fmt: skip
def test_findings_of_wrong_types_are_refused_in_words_though_the_hash_is_right(
    wrong_dir: Path, prep: Prep, tmp_path: Path, key: str, value: object
) -> None:
    path = wrong_dir / "findings.json"
    data = json.loads(path.read_text())
    data["findings"][0][key] = value
    path.write_text(json.dumps(data))
    seal(path)
    for words in (["run", wrong_dir], ["--shard_id", 1, "--output_dir", wrong_dir]):
        done = prep.command(*words)
        assert (done.code, "findings.json" in done.text) == (65, True)
    for name in ("status", "report", "retry"):
        assert "findings.json" in slurm(name, wrong_dir, code=65)
    assert export(prep, "nanogpt")(wrong_dir, tmp_path / "out") == 65
    with pytest.raises(BrokenShard, match=r"findings\.json"):
        load(wrong_dir)
