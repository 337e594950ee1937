"""The lustre package against a fake lfs that refuses what the real one refuses."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import lustre.lfs
import lustre.mounts
from lustre import LustreError, LustreUsageError, apply_stripe, check_stripe, set_directory_stripe
from lustre.__main__ import main
from lustre.layout import parse_layout, read_layout
from lustre.mounts import mount_of

MIB, GIB = 1 << 20, 1 << 30
PFL = [
    {"end": 256 * MIB, "count": 1, "size": 4 * MIB, "pattern": "raid0"},
    {"end": None, "count": -1, "size": 4 * MIB, "pattern": "raid0"},
]


@dataclass(frozen=True, kw_only=True)
class FakeLustre:
    """A folder that looks as if it stood on Lustre, and what the fake lfs was asked."""

    folder: Path
    state_file: Path
    monkeypatch: pytest.MonkeyPatch

    def calls(self) -> list[list[str]]:
        """Argument lists, each with its LC_ALL last."""
        return json.loads(self.state_file.read_text())["calls"] if self.state_file.exists() else []

    def setstripe_calls(self) -> list[list[str]]:
        return [call for call in self.calls() if call[0] == "setstripe"]

    def give_layout(self, path: Path, layout: list[dict[str, object]]) -> None:
        self.state_file.write_text(json.dumps({"layouts": {str(path): layout}, "calls": []}))

    def fault(self, name: str) -> None:
        self.monkeypatch.setenv("FAKE_LFS_FAULT", name)


@pytest.fixture(params=["2.15", "2.17"])
def on_lustre(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLustre:
    tools = tmp_path / "bin"
    tools.mkdir()
    shutil.copy(Path(__file__).with_name("fake_lfs"), tools / "lfs")
    root = tmp_path / "scratch file"
    (root / "O").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LFS_STATE", str(tmp_path / "lfs.json"))
    monkeypatch.setenv("FAKE_LFS_DIALECT", request.param)
    escaped = str(root).replace(" ", "\\040")
    table = f"/dev/vda / ext4 rw 0 0\n10.0.0.1@tcp:/fakefs {escaped} lustre rw,flock 0 0\n"
    monkeypatch.setattr(lustre.mounts, "read_mounts_table", lambda: table)
    return FakeLustre(folder=root / "O", state_file=tmp_path / "lfs.json", monkeypatch=monkeypatch)


def test_a_number_sets_the_default_of_a_fresh_folder_and_reads_it_back(on_lustre: FakeLustre) -> None:
    line = apply_stripe(on_lustre.folder, "8")
    assert "now gives new files plain: 8 stripes" in line
    assert read_layout(on_lustre.folder).components[0].stripe_count == 8
    assert read_layout(on_lustre.folder).is_own


def test_lfs_is_called_with_an_absolute_path_in_the_c_locale(
    on_lustre: FakeLustre, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(on_lustre.folder.parent)
    monkeypatch.setenv("LC_ALL", "ko_KR.UTF-8")
    apply_stripe(Path("O"), "4")
    assert on_lustre.setstripe_calls() == [["setstripe", "-c", "4", str(on_lustre.folder), "LC_ALL=C"]]
    assert {call[-1] for call in on_lustre.calls()} == {"LC_ALL=C"}


def test_all_osts_can_be_asked_for(on_lustre: FakeLustre) -> None:
    assert "a stripe on every OST" in apply_stripe(on_lustre.folder, "-1")


def test_a_folder_that_has_the_layout_is_left_alone_even_when_full(on_lustre: FakeLustre) -> None:
    apply_stripe(on_lustre.folder, "8")
    (on_lustre.folder / "plan.json").write_text("{}")
    assert "has it already" in apply_stripe(on_lustre.folder, "8")
    assert len(on_lustre.setstripe_calls()) == 1


def test_an_inherited_layout_of_the_same_count_is_still_made_the_folders_own(on_lustre: FakeLustre) -> None:
    assert "now gives" in apply_stripe(on_lustre.folder, "1")
    assert len(on_lustre.setstripe_calls()) == 1


def test_auto_changes_nothing_and_tells_what_new_files_get(on_lustre: FakeLustre) -> None:
    on_lustre.give_layout(on_lustre.folder.parent, PFL)
    line = apply_stripe(on_lustre.folder, "auto")
    assert line == (
        "stripe auto: left as it is; new files get progressive (PFL): "
        "1 stripe of 4 MiB up to 256 MiB, a stripe on every OST of 4 MiB from there on"
    )
    assert on_lustre.setstripe_calls() == []


@pytest.mark.parametrize("fault", ["gibberish", "hang", "not-lustre"])
def test_auto_never_fails(on_lustre: FakeLustre, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(lustre.lfs.run_lfs, "__kwdefaults__", {"timeout_s": 0.5})
    on_lustre.fault(fault)
    assert "cannot be told" in apply_stripe(on_lustre.folder, "auto")


def test_none_does_not_even_ask(on_lustre: FakeLustre) -> None:
    assert "left as it is" in apply_stripe(on_lustre.folder, "none")
    assert on_lustre.calls() == []


@pytest.mark.parametrize("stripe", ["0", "-2", "2001", "8x", "", "1e3", " 8", "٨", "Auto"])
def test_an_impossible_count_is_refused_before_lfs_runs(on_lustre: FakeLustre, stripe: str) -> None:
    with pytest.raises(LustreUsageError, match="expected auto, none, a number") as caught:
        apply_stripe(on_lustre.folder, stripe)
    assert caught.value.exit_code == 2
    assert on_lustre.calls() == []


def test_the_largest_and_smallest_counts_are_taken() -> None:
    assert [check_stripe(stripe) for stripe in ("-1", "1", "2000", "auto", "none")] == [
        -1,
        1,
        2000,
        None,
        None,
    ]


def test_a_count_above_the_osts_is_reported_as_clamped(on_lustre: FakeLustre) -> None:
    assert "asked for 100, which is more than the 8 OSTs here" in apply_stripe(on_lustre.folder, "100")


@pytest.mark.parametrize("fault", ["", "empties-files"])
def test_a_file_is_refused_and_keeps_its_bytes(on_lustre: FakeLustre, fault: str) -> None:
    on_lustre.fault(fault)
    file = on_lustre.folder / "shard-00000.tar"
    file.write_bytes(b"precious")
    for path in (file, on_lustre.folder / "absent"):
        with pytest.raises(LustreError, match="expected an existing, empty directory"):
            set_directory_stripe(path, 8)
    assert file.read_bytes() == b"precious"
    assert on_lustre.setstripe_calls() == []


def test_a_folder_with_files_is_refused(on_lustre: FakeLustre) -> None:
    (on_lustre.folder / "shard-00000.tar").write_bytes(b"precious")
    with pytest.raises(LustreError, match=r"holds shard-00000\.tar.*expected an empty directory") as caught:
        apply_stripe(on_lustre.folder, "8")
    assert caught.value.exit_code == 73
    assert on_lustre.setstripe_calls() == []


def test_a_wrapper_that_rewrites_the_count_is_noticed(on_lustre: FakeLustre) -> None:
    on_lustre.fault("wrapper-count-1")
    with pytest.raises(LustreError, match=r"exited 0, but new files get plain: 1 stripe.*expected 8 stripes"):
        apply_stripe(on_lustre.folder, "8")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("not-owner", "exit code 1: .*Operation not permitted.*owner"),
        ("no-space", "exit code 28: .*No space left on device"),
        ("not-lustre", "exit code 25: .*Inappropriate ioctl"),
        ("gibberish", "printed 'Please see .*expected stripe_count"),
    ],
)
def test_what_lfs_refuses_is_told_in_its_own_words(on_lustre: FakeLustre, fault: str, words: str) -> None:
    on_lustre.fault(fault)
    with pytest.raises(LustreError, match=words):
        apply_stripe(on_lustre.folder, "8")


def test_a_server_that_does_not_answer_ends_with_the_time_limit(on_lustre: FakeLustre) -> None:
    on_lustre.fault("hang")
    with pytest.raises(LustreError, match=r"no answer in 0\.5 s.*server"):
        lustre.lfs.run_lfs(["getstripe", "-d", "-y"], on_lustre.folder, timeout_s=0.5)


@pytest.mark.parametrize("stripe", ["auto", "none", "8"])
def test_off_lustre_nothing_is_done_and_the_reason_told(tmp_path: Path, stripe: str) -> None:
    (tmp_path / "holds something").touch()
    line = apply_stripe(tmp_path, stripe)
    assert "left as it is" in line or "not on Lustre" in line


def test_without_lfs_nothing_is_done_and_the_reason_told(
    on_lustre: FakeLustre, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert apply_stripe(on_lustre.folder, "8").endswith("is on Lustre, but there is no lfs on PATH")


def test_show_tells_plain_and_progressive_layouts(
    on_lustre: FakeLustre, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(on_lustre.folder)]) == 0
    assert "lustre at" in (plain := capsys.readouterr().out)
    assert "new files get plain: 1 stripe of" in plain
    assert "(inherited" in plain
    on_lustre.give_layout(on_lustre.folder, PFL)
    assert main(["show", str(on_lustre.folder)]) == 0
    assert "new files get progressive (PFL): 1 stripe of 4 MiB up to 256 MiB" in capsys.readouterr().out
    assert main(["show", str(on_lustre.folder / "not" / "yet")]) == 0
    assert "not there yet" in capsys.readouterr().out
    assert on_lustre.setstripe_calls() == []


def test_show_tells_the_layout_of_a_file(on_lustre: FakeLustre, capsys: pytest.CaptureFixture[str]) -> None:
    file = on_lustre.folder / "stripe_count: 77"
    file.write_bytes(b"")
    on_lustre.give_layout(on_lustre.folder, PFL[:1])
    assert main(["show", str(file)]) == 0
    assert "this file has plain: 1 stripe of 4 MiB" in capsys.readouterr().out
    on_lustre.give_layout(file, PFL)
    assert main(["show", str(file)]) == 0
    assert "this file has progressive (PFL)" in capsys.readouterr().out


def test_show_off_lustre_says_so_and_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / "absent")]) == 0
    assert "not on Lustre" in capsys.readouterr().out


def test_show_ends_with_73_where_lfs_fails(on_lustre: FakeLustre, capsys: pytest.CaptureFixture[str]) -> None:
    on_lustre.fault("gibberish")
    assert main(["show", str(on_lustre.folder)]) == 73
    assert capsys.readouterr().err.startswith("error: lfs getstripe printed")


def test_the_longest_and_last_mount_point_wins() -> None:
    table = "a / ext4 rw\nb /data lustre rw\nc /data/x nfs rw\nd /data/x lustre rw\ne /da tmpfs rw\nbroken\n"
    sources = {
        path: mount_of(path, table).source for path in ("/", "/data", "/data/x/y", "/database", "/data/xy")
    }
    assert sources == {"/": "a", "/data": "b", "/data/x/y": "d", "/database": "a", "/data/xy": "b"}
    assert mount_of("/anything", "") is None


def test_the_classic_line_of_a_directory_is_read_with_an_empty_pattern_too() -> None:
    line = "stripe_count:  2 stripe_size:   4194304 pattern:       raid0 stripe_offset: -1"
    layout = parse_layout(line)
    assert (layout.components[0].stripe_count, layout.components[0].stripe_size_bytes) == (2, 4 * MIB)
    assert layout.is_own
    assert not parse_layout(line.replace("raid0", "")).is_own
    assert not parse_layout(line.replace("raid0", "0")).is_own


def test_pools_and_data_on_the_metadata_server_are_read() -> None:
    output = """  lcm_layout_gen:    3
  component0:
    lcme_id:             1
    lcme_extent.e_start: 0
    lcme_extent.e_end:   65536
    sub_layout:
      lmm_stripe_count:  0
      lmm_stripe_size:   65536
      lmm_pattern:       mdt
  component1:
    lcme_id:             2
    lcme_extent.e_start: 65536
    lcme_extent.e_end:   EOF
    sub_layout:
      lmm_stripe_count:  2
      lmm_stripe_size:   1048576
      lmm_pattern:       raid0
      lmm_pool:          flash
      lmm_objects:
      - l_ost_idx: 5
        l_fid:     0x3c0000400:0xc:0x0
"""
    assert parse_layout(output).text() == (
        "progressive (PFL): on the metadata server up to 64 KiB, "
        "2 stripes of 1 MiB in pool flash from there on"
    )
