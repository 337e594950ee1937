"""Bad input and bad surroundings end with a line that helps and the exit code of docs, and lose nothing."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Ended, Prep

BOUND_CAPABILITIES = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
PR_CAPBSET_DROP = 24


def heed_permissions() -> None:
    """Between fork and exec: give up root's right to read and write whatever it likes."""
    if os.geteuid() == 0:
        for capability in BOUND_CAPABILITIES:
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def ends(ended: Ended, code: int, *said: str) -> None:
    assert ended.code == code, ended.text
    assert "Traceback" not in ended.text
    for part in said:
        assert re.search(part, ended.text), ended.text


@pytest.fixture
def raw_dir(sample_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sample_dir, tmp_path / "raw"))


def plan_args(prep: Prep, raw: Path, out: Path) -> list[object]:
    return ["plan", "--input_dir", raw, "--output_dir", out, "--model_id", prep.model_dir]


@pytest.mark.processes
def test_an_input_that_cannot_be_read_is_66_when_planning_and_when_working(
    prep: Prep, raw_dir: Path, tmp_path: Path
) -> None:
    prep.plan(raw_dir, tmp_path / "data")
    path = raw_dir / "en_1.txt"
    path.chmod(0)
    planning = prep.cli(*plan_args(prep, raw_dir, tmp_path / "other"), preexec_fn=heed_permissions)
    ends(planning, 66, r"input .*en_1\.txt cannot be opened: Permission denied")
    working = prep.cli("--shard_id", 1, "--output_dir", tmp_path / "data", preexec_fn=heed_permissions)
    ends(working, 66, r"input .*en_1\.txt cannot be opened: Permission denied")
    assert prep.names(tmp_path / "data") == ["plan.json", "tokenizer"]
    ends(prep.cli("--shard_id", 0, "--output_dir", tmp_path / "data", preexec_fn=heed_permissions), 0)


@pytest.mark.processes
@pytest.mark.parametrize("flags", [[], ["--recursive"]], ids=["folder", "subfolder"])
def test_a_folder_that_cannot_be_listed_is_66_and_nothing_in_it_is_left_out_silently(
    prep: Prep, raw_dir: Path, tmp_path: Path, flags: list[str]
) -> None:
    locked = raw_dir
    if flags:
        locked = raw_dir / "sub"
        locked.mkdir()
    locked.chmod(0)
    try:
        argv = [*plan_args(prep, raw_dir, tmp_path / "data"), *flags]
        ended = prep.cli(*argv, preexec_fn=heed_permissions)
    finally:
        locked.chmod(0o755)
    ends(ended, 66, f"{locked}.* Permission denied")


@pytest.fixture
def bad_dir(raw_dir: Path) -> Path:
    """A file of 140 documents and two that are no UTF-8: 1.4 per cent."""
    path = raw_dir / "en_0.txt"
    path.write_bytes(b"good\n" + b"bad \xff\n" + path.read_bytes() + b"\r\n\xea\xb0")
    return raw_dir


def test_undecodable_documents_below_the_limit_are_left_out_counted_and_named(
    prep: Prep, bad_dir: Path, tmp_path: Path
) -> None:
    prep.plan(bad_dir, tmp_path / "data", max_bad_fraction=0.02)
    ended = prep.command("--shard_id", 0, "--output_dir", tmp_path / "data")
    path = tmp_path / "data" / "quarantine" / "shard-00000.jsonl"
    ends(ended, 0, f"2 documents were left out: {path}")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    size = (bad_dir / "en_0.txt").stat().st_size
    assert [(row["source"], row["source_offset"], row["num_bytes"]) for row in rows] == [
        ("en_0.txt", 5, 6),
        ("en_0.txt", size - 2, 2),
    ]
    assert {row["reason"] for row in rows} == {"undecodable"}
    assert "byte 9 is not utf-8" in rows[0]["detail"]
    manifest = json.loads((tmp_path / "data" / "shard-00000.json").read_bytes())
    assert manifest["counts"]["quarantined"] == {"undecodable": 2}
    assert manifest["counts"]["num_documents"] == 141
    assert manifest["quarantine"]["num_bytes"] == path.stat().st_size
    keys = [name for name, _ in prep.members(tmp_path / "data" / "shard-00000.tar")]
    assert "sample_0_00000000.text.txt" in keys
    assert "sample_0_00000001.text.txt" not in keys, "line 1 is the first bad one"
    assert "sample_0_00000002.text.txt" in keys


def test_a_file_of_another_encoding_is_65_and_asks_for_it(prep: Prep, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.txt").write_bytes("한국어 문장\n두 번째\n".encode("cp949"))
    prep.plan(tmp_path / "raw", tmp_path / "data")
    ended = prep.command("--shard_id", 0, "--output_dir", tmp_path / "data")
    ends(ended, 65, r"2 documents \(100\.00%\).*undecodable.*--encoding")
    prep.plan(tmp_path / "raw", tmp_path / "right", encoding="cp949")
    ends(prep.command("--shard_id", 0, "--output_dir", tmp_path / "right"), 0, "2 documents")


@pytest.mark.processes
def test_an_unknown_model_without_a_network_is_66(prep: Prep, raw_dir: Path, tmp_path: Path) -> None:
    args = plan_args(prep, raw_dir, tmp_path / "data")
    args[-1] = "nobody/no-such-model"
    ends(
        prep.cli(*args, env={"HF_HUB_OFFLINE": "1"}), 66,
        "nobody/no-such-model, here or on the hub",
        "hf download nobody/no-such-model ",
    )  # fmt: skip
    assert not (tmp_path / "data").exists()


@pytest.mark.processes
def test_a_folder_without_a_tokenizer_is_66(prep: Prep, raw_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    args = plan_args(prep, raw_dir, tmp_path / "data")
    args[-1] = tmp_path / "model"
    ends(prep.command(*args), 66, f"no usable tokenizer was found in the folder {tmp_path / 'model'}")


@pytest.mark.processes
def test_a_slow_tokenizer_is_2(prep: Prep, raw_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (model / "config.json").write_text('{"model_type": "t5"}')
    args = plan_args(prep, raw_dir, tmp_path / "data")
    args[-1] = model
    ends(prep.command(*args), 2, r"the tokenizer of .* is a slow one \(ByT5Tokenizer\); a fast one is needed")


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own at ``folder``."""
    folder.mkdir()
    options = f"size={size},mode=0755"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here to be filled: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.processes
@pytest.mark.parametrize("command", ["task", "run"])
def test_a_full_disk_is_74_leaves_nothing_and_loses_nothing(
    prep: Prep, raw_dir: Path, tmp_path: Path, command: str
) -> None:
    if not shutil.which("mount"):
        pytest.skip("there is no mount command here")
    data = tmp_path / "disk"
    with small_disk(data, "6m"):
        prep.plan(raw_dir, data, num_shards=3)
        argv = (
            ["--shard_id", 0, "--output_dir", data] if command == "task" else ["run", data, "--num_proc", 1]
        )
        free = os.statvfs(data).f_bavail * os.statvfs(data).f_frsize
        (data / "filler").write_bytes(bytes(free - 100_000))
        before = prep.names(data)
        ended = prep.cli(*argv)
        ends(ended, 74, "No space left on device", r"mend the cause \(df, lfs df, quota\) and run this again")
        records = {"jobs"} if command == "run" else set()  # of the attempt that failed
        assert set(prep.names(data)) == {*before, *records}
        (data / "filler").unlink()
        ends(prep.cli(*argv), 0)
        assert (data / "shard-00000.json").exists()


@pytest.mark.processes
@pytest.mark.parametrize("state", ["planned", "not planned", "not there"])
def test_no_permission_on_the_output_is_73(prep: Prep, raw_dir: Path, tmp_path: Path, state: str) -> None:
    parent = tmp_path / "parent"
    data = parent / "data"
    parent.mkdir()
    if state == "planned":
        prep.plan(raw_dir, data)
    elif state == "not planned":
        data.mkdir()
    locked = parent if state == "not there" else data
    locked.chmod(0o555)
    argv: list[object] = plan_args(prep, raw_dir, data)
    if state == "planned":
        argv = ["--shard_id", 0, "--output_dir", data]
    try:
        ended = prep.cli(*argv, preexec_fn=heed_permissions)
    finally:
        locked.chmod(0o755)
    ends(ended, 73, f"{data}.*Permission denied")


@pytest.mark.processes
def test_a_plan_that_cannot_be_read_is_74(prep: Prep, data_dir: Path) -> None:
    (data_dir / "plan.json").chmod(0)
    ended = prep.cli("--shard_id", 0, "--output_dir", data_dir, preexec_fn=heed_permissions)
    words = rf"plan\.json cannot be read: Permission denied; its owner can type: chmod -R a\+rX {data_dir}$"
    ends(ended, 74, words)


def test_shards_of_another_plan_in_the_way_are_78_and_stay(
    prep: Prep, data_dir: Path, sample_dir: Path, tmp_path: Path
) -> None:
    prep.plan(sample_dir, tmp_path / "other", num_shards=4)
    prep.make(tmp_path / "other", 1)
    for path in (tmp_path / "other").glob("shard-*"):
        shutil.copy(path, data_dir)
    before = prep.contents(data_dir)
    ended = prep.command("--shard_id", 1, "--output_dir", data_dir)
    ends(ended, 78, r"shard-00001\.json is shard 1 of plan \w{12}, expected shard 1 of")
    ends(prep.command("run", data_dir), 78)
    assert prep.contents(data_dir) == before


@pytest.mark.slow
def test_documents_asked_of_a_packed_plan_are_78(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    prep.plan(sample_dir, tmp_path / "data", num_shards=2, record="packed", seq_len=32)
    ended = prep.command("--shard_id", 0, "--output_dir", tmp_path / "data", "--record", "documents")
    ends(ended, 78, "--record was packed, now documents")
    given = ["--record", "packed", "--seq_len", 32, "--append_eos"]
    ends(prep.command("--shard_id", 0, "--output_dir", tmp_path / "data", *given), 0)


def test_the_plans_own_options_and_tokenizer_may_be_given_again(
    prep: Prep, data_dir: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(prep.model_dir, tmp_path / "copy")
    given = ["--encoding", "UTF8", "--record", "documents", "--keep_text", "--model_id", copy]
    ends(prep.command("--shard_id", 0, "--output_dir", data_dir, *given), 0)
