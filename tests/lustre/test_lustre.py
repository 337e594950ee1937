"""The lustre package against a fake lfs that refuses what the real one refuses."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import lustre.lfs
import lustre.restore
import lustre.show
from loader.__main__ import main as loader_main
from loader.find_shards import find_shards
from lustre import LustreError, StripeRequest
from lustre.__main__ import main
from lustre.apply import set_directory_layout
from lustre.layout import Component, Layout, read_layout
from shardprep.errors import UsageError
from tests.checkout import ROOT
from tests.lustre.fake_lustre import (
    GIB,
    MIB,
    FakeLustre,
    apply_stripe,
    both_dialects,
    first_osts,
    install_fake_lfs,
)

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

PFL: list[dict[str, object]] = [
    {"end": 256 * MIB, "count": 1, "size": 4 * MIB, "pattern": "raid0"},
    {"end": None, "count": -1, "size": 4 * MIB, "pattern": "raid0"},
]
FSX: list[dict[str, object]] = [
    {"end": end, "count": count, "size": MIB, "pattern": "raid0"}
    for end, count in ((100 * MIB, 1), (10 * GIB, 8), (100 * GIB, 16), (None, 32))
]
EIGHT = Layout(components=(Component(stripe_count=8, stripe_size_bytes=0),), is_composite=False)


@both_dialects
def test_a_number_sets_the_default_of_a_fresh_folder_and_reads_it_back(on_lustre: FakeLustre) -> None:
    line = apply_stripe(on_lustre.folder, "8")
    assert "now gives new files progressive (PFL): 1 stripe of 4 MiB up to 64 MiB, 8 stripes" in line
    assert [part.stripe_count for part in read_layout(on_lustre.folder).components] == [1, 8]
    assert not read_layout(on_lustre.folder).is_inherited


def test_lfs_is_called_with_an_absolute_path_in_the_c_locale(
    on_lustre: FakeLustre, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(on_lustre.folder.parent)
    monkeypatch.setenv("LC_ALL", "ko_KR.UTF-8")
    apply_stripe(Path("O"), "1")
    assert ["setstripe", "-c", "1", str(on_lustre.folder), "LC_ALL=C"] in on_lustre.calls()
    assert {call[-1] for call in on_lustre.calls()} == {"LC_ALL=C"}


def test_an_inherited_layout_of_the_same_count_is_still_made_the_folders_own(on_lustre: FakeLustre) -> None:
    assert "now gives" in apply_stripe(on_lustre.folder, "1")
    assert len(on_lustre.setstripe_calls()) == 1


@both_dialects
def test_auto_changes_nothing_and_tells_what_new_files_get(on_lustre: FakeLustre) -> None:
    on_lustre.give_layout(on_lustre.folder.parent, PFL)
    line = apply_stripe(on_lustre.folder, "auto")
    assert line == (
        "stripe auto: left as it is; new files get progressive (PFL): "
        "1 stripe of 4 MiB up to 256 MiB, a stripe on every OST of 4 MiB from there on; "
        "the site chose this progressive layout"
    )
    assert on_lustre.setstripe_calls() == []


@pytest.mark.parametrize("fault", ["gibberish", "hang", "not-lustre"])
def test_auto_never_fails(on_lustre: FakeLustre, fault: str) -> None:
    on_lustre.fault(fault)
    assert "cannot be told" in apply_stripe(on_lustre.folder, "auto")


def test_none_does_not_even_ask(on_lustre: FakeLustre) -> None:
    assert "left as it is" in apply_stripe(on_lustre.folder, "none")
    assert on_lustre.calls() == []


@pytest.mark.parametrize("stripe", ["0", "-2", "2001", "8x", "", "1e3", " 8", "٨", "Auto"])
def test_an_impossible_count_is_refused_before_lfs_runs(on_lustre: FakeLustre, stripe: str) -> None:
    with pytest.raises(UsageError, match="auto, none, a layout such as 1G:1,-1:8, a number") as caught:
        apply_stripe(on_lustre.folder, stripe)
    assert caught.value.exit_code == 2
    assert on_lustre.calls() == []


def test_the_largest_and_smallest_counts_are_taken() -> None:
    layouts = [StripeRequest(stripe=stripe).layout() for stripe in ("-1", "1", "2000", "auto", "none")]
    assert [layout and layout.components[-1].stripe_count for layout in layouts] == [-1, 1, 2000, None, None]


@both_dialects
def test_a_count_above_the_osts_is_reported_as_clamped(on_lustre: FakeLustre) -> None:
    assert "asked for 100, which is more than the 8 OSTs here" in apply_stripe(on_lustre.folder, "100")


@pytest.mark.parametrize("fault", ["", "empties-files"])
def test_a_file_is_refused_and_keeps_its_bytes(on_lustre: FakeLustre, fault: str) -> None:
    on_lustre.fault(fault)
    file = on_lustre.folder / "shard-00000.tar"
    file.write_bytes(b"precious")
    for path in (file, on_lustre.folder / "absent"):
        with pytest.raises(LustreError, match="expected an existing, empty directory"):
            set_directory_layout(path, EIGHT)
    assert file.read_bytes() == b"precious"
    assert on_lustre.setstripe_calls() == []


@both_dialects
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
        apply_stripe(on_lustre.folder, "1")


@pytest.mark.parametrize("stripe", ["auto", "none", "8"])
def test_off_lustre_nothing_is_done_and_the_reason_told(tmp_path: Path, stripe: str) -> None:
    (tmp_path / "holds something").touch()
    line = apply_stripe(tmp_path, stripe)
    assert "left as it is" in line or "not on Lustre" in line


@both_dialects
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
    assert main(["show", str(on_lustre.folder / "not" / "yet")]) == 66
    assert f"will copy: shardprep lustre show '{on_lustre.folder}'\n" in capsys.readouterr().err
    assert on_lustre.setstripe_calls() == []


@both_dialects
def test_show_tells_the_layout_of_a_file(on_lustre: FakeLustre, capsys: pytest.CaptureFixture[str]) -> None:
    file = on_lustre.folder / "stripe_count: 77"
    file.write_bytes(b"")
    on_lustre.give_layout(on_lustre.folder, [{**PFL[0], "end": None}])
    assert main(["show", str(file)]) == 0
    assert "this file has plain: 1 stripe of 4 MiB" in capsys.readouterr().out
    on_lustre.give_layout(file, PFL)
    assert main(["show", str(file)]) == 0
    assert "this file has progressive (PFL)" in capsys.readouterr().out


def test_show_ends_with_73_where_lfs_fails(on_lustre: FakeLustre, capsys: pytest.CaptureFixture[str]) -> None:
    on_lustre.fault("gibberish")
    assert main(["show", str(on_lustre.folder)]) == 73
    assert capsys.readouterr().err.startswith("error: lfs getstripe printed")


# --- apply


@both_dialects
def test_apply_sets_a_plain_layout_with_sizes_in_plain_bytes(on_lustre: FakeLustre) -> None:
    code, text = on_lustre.command("apply", on_lustre.folder, "-c", "8", "-S", "4M", "--pool", "disk")
    assert code == 0
    assert "now gives new files plain: 6 stripes of 4 MiB in pool disk" in text
    assert on_lustre.setstripe_calls() == ["-c 8 -S 4194304 -p disk"]
    assert "asked for 8, which is more than the 6 OSTs in pool disk" in text


@both_dialects
def test_apply_sets_a_progressive_layout_and_reads_every_component_back(on_lustre: FakeLustre) -> None:
    code, text = on_lustre.command("apply", on_lustre.folder, "--pfl", "1G:1,10G:4:8M,-1:8")
    assert code == 0, text
    assert on_lustre.setstripe_calls() == [
        "-E 1073741824 -c 1 -S 4194304 -E 10737418240 -c 4 -S 8388608 -E -1 -c 8 -S 4194304"
    ]
    found = [
        (part.start_bytes, part.end_bytes, part.stripe_count, part.stripe_size_bytes)
        for part in read_layout(on_lustre.folder).components
    ]
    assert found == [
        (0, GIB, 1, 4 * MIB),
        (GIB, 10 * GIB, 4, 8 * MIB),
        (10 * GIB, None, 8, 4 * MIB),
    ]


@both_dialects
def test_dom_is_set_by_name_alone_without_a_count_or_size_of_its_own(on_lustre: FakeLustre) -> None:
    code, text = on_lustre.command("apply", on_lustre.folder, "--dom", "64K", "-c", "2")
    assert code == 0, text
    assert on_lustre.setstripe_calls() == ["-E 65536 -L mdt -E -1 -c 2 -S 4194304"]
    assert "on the metadata server up to 64 KiB, 2 stripes of 4 MiB from there on" in text


def test_a_dry_run_tells_the_command_and_sets_nothing(on_lustre: FakeLustre) -> None:
    code, text = on_lustre.command("apply", on_lustre.folder, "--pfl=1G:1,-1:20", "--dry-run")
    assert code == 0
    assert "would run: lfs setstripe -E 1073741824 -c 1 -S 4194304 -E -1 -c 20 -S 4194304 '/" in text
    assert "asked for 20, which is more than the 8 OSTs here" in text
    assert on_lustre.setstripe_calls() == []


def test_a_dry_run_refuses_what_the_run_would_refuse(on_lustre: FakeLustre) -> None:
    (on_lustre.folder / "a").touch()
    assert on_lustre.command("apply", on_lustre.folder, "-c", "8", "--dry_run")[0] == 73
    assert on_lustre.command("apply", on_lustre.folder, "--pool", "nope", "--dry_run")[0] == 73


def test_a_layout_that_is_there_already_is_not_set_again(on_lustre: FakeLustre) -> None:
    for _ in range(2):
        code, text = on_lustre.command("apply", on_lustre.folder, "--pfl", "1G:1,-1:100")
        assert code == 0
        (on_lustre.folder / "shard-00000.tar").touch()
    assert "has it already" in text
    assert len(on_lustre.setstripe_calls()) == 1


@both_dialects
def test_without_a_layout_named_apply_takes_the_tables_and_says_why(on_lustre: FakeLustre) -> None:
    code, text = on_lustre.command("apply", on_lustre.folder, "--shard_bytes", "2G", "--num_shards", "8")
    assert code == 0
    assert "for 8 shards of 2 GiB: plain: 4 stripes of 4 MiB" in text
    assert "source: wiki.lustre.org" in text
    assert on_lustre.setstripe_calls() == ["-c 4 -S 4194304"]


@both_dialects
@pytest.mark.parametrize(
    ("layout", "place", "reason"),
    [
        (PFL, "parent", "the site chose this progressive layout"),
        (FSX, "parent", "the default of FSx"),
        (
            [{"end": None, "count": 4, "size": MIB, "pattern": "raid0"}],
            "parent",
            "the site chose this default",
        ),
        ([{"end": None, "count": 1, "size": MIB, "pattern": "raid0"}], "folder", "a default of its own"),
    ],
)
def test_a_layout_that_somebody_chose_is_left_alone_unless_another_is_named(
    on_lustre: FakeLustre, layout: list[dict[str, object]], place: str, reason: str
) -> None:
    on_lustre.give_layout(on_lustre.folder.parent if place == "parent" else on_lustre.folder, layout)
    code, text = on_lustre.command("apply", on_lustre.folder, "--shard_bytes", "2G")
    assert code == 0
    assert "left as it is" in text
    assert reason in text
    assert on_lustre.setstripe_calls() == []
    assert on_lustre.command("apply", on_lustre.folder, "-c", "2")[0] == 0
    assert len(on_lustre.setstripe_calls()) == 1


# --- the failure table of the facts: what lfs does, and what is done about it


@pytest.mark.parametrize(
    "words",
    [
        ["show", "{}"],
        ["show", "{}", "--shard_bytes", "2G", "--num_shards", "500", "--num_readers", "256"],
        ["show", "{}/file"],
        ["apply", "{}"],
        ["apply", "{}", "-c", "8"],
        ["apply", "{}/file", "-c", "8"],
        ["apply", "{}/absent", "--pfl", "1G:1,-1:8"],
        ["apply", "{}", "--dom", "64K", "-c", "1", "--dry_run"],
    ],
)
def test_off_lustre_every_command_says_so_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    folder = tmp_path / "O"
    folder.mkdir()
    install_fake_lfs(tmp_path, monkeypatch)
    (folder / "file").write_bytes(b"precious")
    assert main([word.format(folder) for word in words]) == 0
    assert "not on Lustre" in capsys.readouterr().out
    assert (folder / "file").read_bytes() == b"precious"
    assert not (folder / "absent").exists()
    assert not (tmp_path / "lfs.state").exists(), "lfs was asked"


@pytest.mark.parametrize("words", [["show"], ["apply", "-c", "8"]])
def test_without_lfs_every_command_says_so_and_succeeds(on_lustre: FakeLustre, words: list[str]) -> None:
    on_lustre.monkeypatch.setenv("PATH", "/nonexistent")
    code, text = on_lustre.command(words[0], on_lustre.folder, *words[1:])
    assert (code, on_lustre.calls()) == (0, [])
    assert "there is no lfs on PATH" in text
    assert apply_stripe(on_lustre.folder, "8").endswith("is on Lustre, but there is no lfs on PATH")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-S", "1000"], "multiple of 64 KiB"),  # lfs: 1000 KiB
        (["-S", "131072b"], "a number of bytes"),  # lfs: 64 MiB
        (["-S", ""], "a number of bytes"),  # lfs: the default
        (["-S", "4G"], "less than 4 GiB"),
        (["-S", "1x"], "a number of bytes"),
        (["-S", "96K"], "multiple of 64 KiB"),
        (["-c", "0"], "from 1 to 2000"),
        (["-c", "2001"], "from 1 to 2000"),
        (["-c", "eight"], "from 1 to 2000"),
        (["--pfl", "3M:1:2M,-1:8"], "multiple of its stripe size"),
        (["--pfl", "100K:1,-1:8"], "multiple of 64 KiB"),
        (["--pfl", "10G:1,1G:4,-1:8"], "expected more than 10 GiB"),
        (["--pfl", "1G:1,1G:4,-1:8"], "expected more than 1 GiB"),
        (["--pfl", "1G:1,10G:4"], "expected -1, the end of the file"),
        (["--pfl=-1:1,10G:4,-1:8"], "expected it last"),
        (["--pfl", "1G,-1:8"], "END:COUNT"),
        (["--pfl", "1G:0,-1:8"], "from 1 to 2000"),
        (["--pfl", ""], "END:COUNT"),
        (["--pfl", "1G:1,-1:8", "-c", "4"], "exclude each other"),
        (["--pool", "a_pool_of_16_char"], "1 to 15 letters"),
        (["--pool", "fakefs.flash"], "without the file system's"),
        (["--pool", ""], "1 to 15 letters"),
        (["--dom", "2G", "-c", "4"], "more than 1 GiB"),
        (["--dom", "64K"], "name the rest"),
        (["--dom", "1G", "--pfl", "1G:1,-1:8"], "expected more than 1 GiB"),
        (["--num_shards", "0"], "expected 1 or more"),
        (["--shard_bytes", "two"], "--shard_bytes is 'two'"),
        (["-i", "99"], "unrecognized arguments"),  # a bad OST index would leave a stray file behind
        (["-o", "1,3-5"], "unrecognized arguments"),
    ],
)
def test_what_lfs_refuses_or_takes_amiss_is_refused_before_it_runs(
    on_lustre: FakeLustre, options: list[str], expected: str
) -> None:
    code, text = on_lustre.command("apply", on_lustre.folder, *options)
    assert (code, on_lustre.calls()) == (2, [])
    assert expected in text


@both_dialects
@pytest.mark.parametrize("options", [["-c", "2"], ["--pfl", "1G:1,-1:2"]])
def test_a_missing_pool_is_refused_with_those_there_are(on_lustre: FakeLustre, options: list[str]) -> None:
    code, text = on_lustre.command("apply", on_lustre.folder, *options, "--pool", "nope")
    assert code == 73
    assert "has no pool 'nope', expected one of: disk, flash" in text
    assert on_lustre.setstripe_calls() == []


def test_a_folder_that_is_not_there_is_to_be_created_first(on_lustre: FakeLustre) -> None:
    code, text = on_lustre.command("apply", on_lustre.folder / "a" / "b", "-c", "8")
    assert code == 73
    assert "is not there, expected an existing, empty directory; create it: mkdir -p " in text
    assert on_lustre.setstripe_calls() == []
    assert not (on_lustre.folder / "a").exists()


@pytest.mark.parametrize("options", [["-c", "2"], ["--pfl", "1G:1,-1:2"]])
@pytest.mark.parametrize(
    ("fault", "errno", "words"),
    [
        ("no-space", 28, ["No space left on device", "8 OSTs, 25% full", "OST 2 is out of space"]),
        ("no-quota", 122, ["Disk quota exceeded", "lfs quota -u"]),
        ("inactive-ost", 121, ["inactive OST among your specified 1 OST(s)"]),
        ("not-owner", 1, ["Operation not permitted", "the owner of"]),
    ],
)
def test_what_the_server_refuses_is_told_with_what_to_do(
    on_lustre: FakeLustre, options: list[str], fault: str, errno: int, words: list[str]
) -> None:
    full = {"used": 268435456, "available": 805306368, "flags": "S", "state": "ACTIVE"}
    on_lustre.give(osts=[{**full, "flags": "S" if number == 2 else ""} for number in range(8)])
    on_lustre.fault(fault)
    code, text = on_lustre.command("apply", on_lustre.folder, *options)
    assert code == 73
    assert f"exit code {1 if '--pfl' in options else errno}: " in text
    for word in words:
        assert word in text


@both_dialects
@pytest.mark.parametrize(
    ("fault", "options", "difference"),
    [
        ("wrapper-size", ["-c", "2", "-S", "4M"], "2 stripes of 64 KiB, expected plain: 2 stripes of 4 MiB"),
        ("wrapper-no-pool", ["-c", "2", "--pool", "flash"], "MiB, expected plain: 2 stripes in pool flash"),
        (
            "wrapper-count-1",
            ["--pfl", "1G:1,-1:8"],
            "MiB up to 1 GiB, 1 stripe of 4 MiB from there on, expected",
        ),
        ("wrapper-drops-last", ["--pfl", "1G:1,10G:4,-1:8"], "up to 10 GiB, expected progressive (PFL): 1"),
        ("wrapper-plain", ["--pfl", "1G:1,-1:8"], "get plain: 1 stripe of 4 MiB, expected progressive (PFL)"),
        ("wrapper-ignores", ["-c", "4"], "MiB, expected plain: 4 stripes"),
    ],
)
def test_a_wrapper_that_rewrites_options_is_noticed_in_any_component(
    on_lustre: FakeLustre, fault: str, options: list[str], difference: str
) -> None:
    on_lustre.fault(fault)
    code, text = on_lustre.command("apply", on_lustre.folder, *options)
    assert code == 73
    assert "exited 0, but new files get" in text
    assert difference in text


@pytest.mark.parametrize("words", [["show"], ["apply", "-c", "8"]])
def test_a_server_that_is_down_ends_every_command_in_time(on_lustre: FakeLustre, words: list[str]) -> None:
    on_lustre.fault("hang")
    code, text = on_lustre.command(words[0], on_lustre.folder, *words[1:])
    assert code == 73
    assert "gave no answer in 0.1 s" in text


# --- show


def test_show_warns_of_targets_that_are_full_closed_or_inactive(on_lustre: FakeLustre) -> None:
    ost = {"used": 25 << 20, "available": 75 << 20, "flags": "", "state": "ACTIVE"}
    on_lustre.give(
        osts=[
            ost,
            {**ost, "used": 95 << 20, "available": 5 << 20},
            {**ost, "used": 100 << 20, "available": 0},
            {**ost, "flags": "S"},
            {**ost, "flags": "R"},
            {**ost, "state": "INACTIVE"},
        ]
    )
    code, text = on_lustre.command("show", on_lustre.folder)
    assert code == 0
    assert "5 OSTs, 54% full: from 25% (OST 0) to 100% (OST 2)" in text
    warnings = [line.removeprefix("warning: ")[:22] for line in text.splitlines() if "warning" in line]
    assert warnings == [
        "OST 1 is 95% full",
        "OST 2 is out of space:",
        "OST 3 is out of space:",
        "OST 4 is read-only (lf",
        "OST 5 is inactive: fil",
    ]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("df-fails", "how full OSTs and MDTs are is unknown"),
        ("hang-hsm_state", "which files are released"),
    ],
)
def test_show_tells_the_layout_even_where_the_rest_fails(
    on_lustre: FakeLustre, fault: str, told: str
) -> None:
    (on_lustre.folder / "a").touch()
    on_lustre.fault(fault)
    code, text = on_lustre.command("show", on_lustre.folder)
    assert code == 0
    assert "new files get plain" in text
    assert told in text


def test_show_warns_of_released_files_and_how_to_bring_them_back(on_lustre: FakeLustre) -> None:
    names = ["a.txt", "b: (0x0000000d) released.txt", "c.txt"]
    for name in names:
        (on_lustre.folder / name).touch()
    assert "files looked at" not in on_lustre.command("show", on_lustre.folder)[1]
    on_lustre.give(released=[str(on_lustre.folder / name) for name in ("a.txt", "c.txt")])
    text = on_lustre.command("show", on_lustre.folder)[1]
    assert "warning: 2 of 3 files looked at are released" in text
    assert f"shardprep lustre restore '{on_lustre.folder}' --wait" in text
    assert "1 of 1 file looked at" in on_lustre.command("show", on_lustre.folder / "a.txt")[1]


@both_dialects
def test_show_chooses_for_the_sizes_and_says_why_and_whose_advice_it_is(on_lustre: FakeLustre) -> None:
    sizes = ["--shard_bytes", "2G", "--num_shards", "500", "--num_readers", "256"]
    code, text = on_lustre.command("show", on_lustre.folder, *sizes)
    assert code == 0
    assert "for 500 shards of 2 GiB: plain: 1 stripe of 4 MiB\n  why: at least 4 shards an OST" in text
    assert "source: docs.nersc.gov" in text
    assert "256 readers have 256 of 500 shards open at once: 8 of 8 OSTs at work, about 32 readers" in text
    has_it = on_lustre.dialect == "2.17"  # whose stripes are of 4 MiB by default
    command = f"in a fresh, empty folder: shardprep lustre apply '{on_lustre.folder}' --count 1 --size 4M"
    assert ("new files get that already" if has_it else command) in text
    on_lustre.give_layout(on_lustre.folder.parent, FSX)
    text = on_lustre.command("show", on_lustre.folder, *sizes)[1]
    assert "but this is the default of FSx for Lustre, which is right for shards: left alone" in text
    assert on_lustre.setstripe_calls() == []


def test_the_command_that_show_prints_sets_what_it_chose(on_lustre: FakeLustre) -> None:
    text = on_lustre.command("show", on_lustre.folder, "--num_shards", "3")[1]
    command = next(line.partition("shardprep lustre ")[2] for line in text.splitlines() if " apply " in line)
    assert on_lustre.command(*shlex.split(command))[0] == 0
    assert "new files get that already" in on_lustre.command("show", on_lustre.folder, "--num_shards", "3")[1]
    assert len(read_layout(on_lustre.folder).components) == 3


# --- where the shards of a data set begin


@pytest.fixture
def shards_on_lustre(on_lustre: FakeLustre, prep: Prep, sample_dir: Path) -> Path:
    """Five shards, on OSTs 3, 1, 3, 0 and 7."""
    prep.plan(sample_dir, on_lustre.folder, num_shards=5)
    prep.make(on_lustre.folder)
    paths = [str(on_lustre.folder / f"shard-{number:05d}.tar") for number in range(5)]
    on_lustre.give(first_ost=dict(zip(paths, [3, 1, 3, 0, 7], strict=True)))
    return on_lustre.folder


@both_dialects
@pytest.mark.parametrize("layout", ["plain", "pfl", "dom"])
def test_verify_writes_on_which_ost_each_tar_begins_and_the_loader_reads_it(
    on_lustre: FakeLustre, shards_on_lustre: Path, prep: Prep, layout: str
) -> None:
    dom: list[dict[str, object]] = [{"end": MIB, "count": 0, "size": MIB, "pattern": "mdt"}, *PFL[1:]]
    if layout != "plain":
        on_lustre.give_layout(shards_on_lustre, PFL if layout == "pfl" else dom)
    ended = prep.command("verify", shards_on_lustre)
    assert (ended.code, "note" in ended.text) == (0, False)
    data = json.loads((shards_on_lustre / "osts.json").read_text())
    assert (data["format"], data["osts"]) == ("shardprep-osts", [3, 1, 3, 0, 7])
    osts = find_shards(shards_on_lustre).osts
    assert osts is not None
    assert osts.tolist() == [3, 1, 3, 0, 7]
    assert prep.temporaries(shards_on_lustre) == []


def test_lfs_is_asked_for_many_files_in_one_call_in_the_order_of_the_shards(
    on_lustre: FakeLustre, shards_on_lustre: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"shard-{number:05d}.tar" for number in range(5)]
    monkeypatch.setattr(lustre.show, "FILES_PER_CALL", 2)
    assert first_osts(shards_on_lustre, names[::-1]) == [7, 0, 3, 1, 3]
    calls = [call for call in on_lustre.calls() if call[0] == "getstripe"]
    assert [len(call) - 2 for call in calls] == [2, 2, 1]
    assert calls[0] == ["getstripe", *(str(shards_on_lustre / name) for name in names[:2:-1]), "LC_ALL=C"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hang-getstripe", "gave no answer in 0.1 s"),
        ("gibberish", "printed 'Please see .*expected the layouts of "),
        ("not-lustre", "Inappropriate ioctl"),
    ],
)
def test_verify_goes_on_where_lfs_fails_and_says_so_in_a_line(
    on_lustre: FakeLustre,
    shards_on_lustre: Path,
    prep: Prep,
    fault: str,
    words: str,
) -> None:
    on_lustre.fault(fault)
    ended = prep.command("verify", shards_on_lustre)
    assert ended.code == 0
    assert re.search(rf"^note: osts\.json is not written, .*{words}.*$", ended.text, re.MULTILINE), ended.text
    assert not (shards_on_lustre / "osts.json").exists()
    assert (shards_on_lustre / "index.json").exists()


def test_one_file_that_is_gone_fails_the_whole_question(on_lustre: FakeLustre) -> None:
    (on_lustre.folder / "a").touch()
    (on_lustre.folder / "c").touch()
    with pytest.raises(LustreError, match=r"3 files of .* exit code 2: .*/b: No such file"):
        first_osts(on_lustre.folder, ["a", "b", "c"])


def test_off_lustre_no_osts_are_looked_for(on_lustre: FakeLustre, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert first_osts(tmp_path, ["a"]) is None
    assert on_lustre.calls() == []


# --- no file is ever harmed


def test_the_trap_sees_a_setstripe_on_a_file_and_on_a_folder_with_files(on_lustre: FakeLustre) -> None:
    """What the fixture checks after every test is not vacuous."""
    file = on_lustre.folder / "file"
    file.write_bytes(b"precious")
    on_lustre.fault("empties-files")
    for path in (on_lustre.folder, file):
        subprocess.run(["lfs", "setstripe", "-c", "2", str(path)], check=True)
    assert file.read_bytes() == b""
    assert on_lustre.state()["violations"] == [str(on_lustre.folder), str(file)]
    on_lustre.give(violations=[])


def test_no_lustre_command_harms_a_file_or_changes_a_folder_with_files(on_lustre: FakeLustre) -> None:
    on_lustre.fault("empties-files")
    file, link = on_lustre.folder / "shard-00000.tar", on_lustre.folder.parent / "link"
    file.write_bytes(b"precious")
    link.symlink_to(file)
    sizes = ["--shard_bytes", "2G", "--num_shards", "500"]
    layouts = [[], sizes, ["-c", "4"], ["-S", "8M"], ["-p", "flash"], ["--pfl", "1G:1,-1:4"]]
    layouts.append(["--dom", "64K", "-c", "1"])
    for path in (on_lustre.folder, file, link):
        assert on_lustre.command("show", path, *sizes)[0] == 0
        for layout in layouts:
            assert on_lustre.command("apply", path, *layout)[0] == 73
            assert on_lustre.command("apply", path, *layout, "--dry_run")[0] == 73
    assert file.read_bytes() == b"precious"
    assert on_lustre.setstripe_calls() == []


def test_from_plan_to_batch_setstripe_runs_once_on_the_fresh_folder(
    on_lustre: FakeLustre, prep: Prep, sample_dir: Path
) -> None:
    """Every command of the toolkit, on a Lustre whose lfs empties files."""
    pytest.importorskip("torch", reason="the loader needs it")
    on_lustre.fault("empties-files")
    out, full = on_lustre.folder, on_lustre.folder.parent / "full"
    full.mkdir()
    (full / "precious").write_bytes(b"precious")
    plan = ["plan", "--input_dir", sample_dir, "--model_id", prep.model_dir, "--num_shards", "2", "--stripe"]
    assert prep.command(*plan, "4", "--output_dir", full).code == 73
    assert prep.command(*plan, "auto", "--output_dir", full).code == 0
    for _ in range(2):
        assert prep.command(*plan, "4", "--output_dir", out).code == 0
    assert prep.command("run", out, "--num_proc", "1").code == 0
    assert prep.command("--shard_id", "1", "--output_dir", out).code == 0
    assert prep.command("verify", out).code == 0
    assert prep.command("doctor", *plan[1:-1], "--output_dir", out).code == 0
    assert loader_main([str(out)]) == 0
    on_lustre.give(released=[str(path) for path in out.glob("shard-*")])
    for words in (["show"], ["restore", "--wait"], ["apply"], ["apply", "--dry_run"]):
        on_lustre.monkeypatch.setattr(lustre.restore, "_POLL_S", 0.0)
        assert on_lustre.command(words[0], out, *words[1:])[0] == 0
    assert on_lustre.state()["released"] == []
    assert {"df", "getstripe", "hsm_restore", "hsm_state", "osts"} <= {call[0] for call in on_lustre.calls()}
    assert on_lustre.setstripe_calls() == ["-E 67108864 -c 1 -S 4194304 -E -1 -c 4 -S 4194304"]
    assert (full / "precious").read_bytes() == b"precious"


def test_setstripe_is_named_in_lustre_alone_and_run_in_one_place() -> None:
    """The one place refuses all but an existing, empty directory; no second one can go around it."""
    folders = ("preprocess", "loader", "slurm", "lustre", "examples", "benchmarks")
    sources = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".sh"}
    ]
    naming = {path.relative_to(ROOT) for path in sources if "setstripe" in path.read_text(encoding="utf-8")}
    assert Path("lustre/apply.py") in naming
    assert {path.parts[0] for path in naming} == {"lustre"}
    runs = {path: path.read_text().count('run_lfs("setstripe"') for path in (ROOT / "lustre").glob("*.py")}
    assert {path.name: number for path, number in runs.items() if number} == {"apply.py": 1}
    other = [path.name for path in runs if re.search(r"subprocess|os\.system", path.read_text())]
    assert other == ["lfs.py"]
