"""What the genuine lfs of 2.15 and 2.17 prints, and what is made of it: starts, pools, trouble."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import lustre.lfs
from lustre import LustreError
from lustre.layout import DataSize, apply_flags, choose_layout, read_layout
from lustre.show import Balance
from tests.lustre.fake_lustre import GIB, MIB, FakeLustre, apply_stripe, both_dialects, first_osts

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

OST = {"used": 25 << 20, "available": 75 << 20, "flags": "", "state": "ACTIVE"}


def genuine(words: str, path: Path) -> subprocess.CompletedProcess[str]:
    """``lfs`` run past the package."""
    return subprocess.run(["lfs", *words.split(), str(path)], check=False, capture_output=True, text=True)


# --- a start that somebody named


@both_dialects
@pytest.mark.parametrize(("start", "told"), [("-i 3", "starting on OST 3"), ("-o 1,3", "on OSTs 1, 3")])
def test_a_start_is_told_and_no_load_is_promised_that_it_makes_impossible(
    on_lustre: FakeLustre, start: str, told: str
) -> None:
    count = "" if "-o" in start else "-c 1"
    assert genuine(f"setstripe {count} {start}", on_lustre.folder).returncode == 0
    sizes = ["--shard_bytes", "2G", "--num_shards", "500", "--num_readers", "256"]
    text = on_lustre.command("show", on_lustre.folder, *sizes)[1]
    assert f"{told} (its own default)" in text
    assert f"warning: every new file lies {told}" in text
    assert "8 of 8 OSTs at work" not in text
    assert f"because every new file lies {told}" in text
    assert f"warning: every new file lies {told}" in apply_stripe(on_lustre.folder, "auto")


@pytest.mark.parametrize("how", ["apply", "plan"])
def test_a_layout_without_a_start_is_not_the_same_as_one_with_it(on_lustre: FakeLustre, how: str) -> None:
    genuine("setstripe -c 1 -i 3", on_lustre.folder)
    if how == "apply":
        text = on_lustre.command("apply", on_lustre.folder, "--count", "1")[1]
    else:
        text = apply_stripe(on_lustre.folder, "1")
    assert "has it already" not in text
    assert "now gives new files plain: 1 stripe" in text
    assert read_layout(on_lustre.folder).fixed_place == ""


@pytest.mark.parametrize("options", [["-c", "2"], ["--pfl", "1G:1,-1:8"]])
def test_a_wrapper_that_adds_a_start_is_noticed(on_lustre: FakeLustre, options: list[str]) -> None:
    on_lustre.fault("wrapper-start")
    code, text = on_lustre.command("apply", on_lustre.folder, *options)
    assert code == 73
    assert re.search("exited 0, but new files get .*, starting on OST 3.*, expected (?!.*OST 3)", text)


# --- lfs that does not run, paths that cannot be looked at


@pytest.mark.parametrize(
    "content", [b"\x7fELF\x02\x01\x01" + bytes(57), b"#!/no/such/interpreter\n"], ids=["binary", "script"]
)
def test_a_lfs_that_cannot_be_started_is_an_error_of_lustre_and_no_traceback(
    on_lustre: FakeLustre, content: bytes, tmp_path: Path, prep: Prep, sample_dir: Path
) -> None:
    lfs = tmp_path / "bin" / "lfs"
    lfs.write_bytes(content)
    lfs.chmod(0o755)
    code, text = on_lustre.command("show", on_lustre.folder)
    assert code == 73
    assert re.search(r"error: .*lfs cannot be started \(.*expected Lustre's lfs for this machine", text)
    options = ["--input_dir", sample_dir, "--model_id", prep.model_dir, "--num_shards", "2"]
    ended = prep.command("plan", *options, "--output_dir", on_lustre.folder)
    assert ended.code == 0
    assert "what new files get cannot be told" in ended.text
    prep.make(on_lustre.folder)
    ended = prep.command("verify", on_lustre.folder)
    assert ended.code == 0
    assert "note: osts.json is not written" in ended.text


@pytest.mark.parametrize(
    "code",
    [
        errno.EACCES,
        errno.EIO,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENAMETOOLONG,
    ],
)
def test_a_path_that_cannot_be_looked_at_is_an_error_that_auto_only_tells(
    on_lustre: FakeLustre, code: int
) -> None:
    stat = Path.stat

    def broken(self: Path, **keywords: bool) -> os.stat_result:
        if self == on_lustre.folder:
            raise OSError(code, os.strerror(code), str(self))
        return stat(self, **keywords)

    on_lustre.monkeypatch.setattr(Path, "stat", broken)
    for words in (["show"], ["apply", "-c", "2"], ["restore"]):
        ended, text = on_lustre.command(words[0], on_lustre.folder, *words[1:])
        assert ended == 73, text
        assert f"cannot be looked at ({os.strerror(code)})" in text
    assert f"cannot be told: {on_lustre.folder} cannot be looked at" in apply_stripe(on_lustre.folder, "auto")
    with pytest.raises(LustreError, match="cannot be looked at"):
        apply_stripe(on_lustre.folder, "8")


# --- what is asked for a note alone


@both_dialects
@pytest.mark.parametrize("how", ["apply", "plan"])
def test_a_layout_is_set_where_lfs_osts_fails(on_lustre: FakeLustre, how: str) -> None:
    on_lustre.fault("osts-fail")
    if how == "apply":
        code, text = on_lustre.command("apply", on_lustre.folder, "--count", "100")
        assert code == 0, text
    else:
        text = apply_stripe(on_lustre.folder, "1")
    assert "now gives new files plain" in text
    assert "more than" not in text
    assert ("fewer stripes than asked for; how many OSTs there are lfs does not tell" in text) == (
        how == "apply"
    )
    sizes = ["--shard_bytes", "2G", "--num_shards", "500", "--num_readers", "256"]
    code, text = on_lustre.command("show", on_lustre.folder, *sizes)
    assert code == 0
    assert "for 500 shards of 2 GiB" in text
    assert "which OSTs are inactive is unknown: `lfs osts" in text


@both_dialects
def test_an_empty_stripe_size_is_one_that_is_not_told(on_lustre: FakeLustre) -> None:
    on_lustre.fault("no-params")
    assert "stripe_size:    pattern" in genuine("getstripe -d", on_lustre.folder).stdout
    code, text = on_lustre.command("show", on_lustre.folder)
    assert code == 0
    assert "new files get plain: 1 stripe (inherited" in text
    assert on_lustre.command("apply", on_lustre.folder, "-c", "2")[0] == 0


# --- OSTs in trouble


@both_dialects
def test_an_ost_that_is_down_does_not_hide_the_others_nor_the_inactive_ones(on_lustre: FakeLustre) -> None:
    down = {**OST, "error": errno.ESHUTDOWN}
    osts = [OST, down, {**OST, "used": 95 << 20, "available": 5 << 20}, {**OST, "state": "INACTIVE"}]
    on_lustre.give(osts=osts)
    assert genuine("df", on_lustre.folder.parent).returncode == errno.ESHUTDOWN
    code, text = on_lustre.command("show", on_lustre.folder)
    assert code == 0
    assert "2 OSTs, 60% full: from 25% (OST 0) to 95% (OST 2)" in text
    assert "warning: OST 1 does not answer: Cannot send after transport endpoint shutdown" in text
    assert "warning: OST 2 is 95% full" in text
    assert text.count("warning: OST 3 is inactive") == 1


@both_dialects
def test_an_ost_that_asks_to_be_tried_again_is_named_in_whatever_way_lfs_leaves_it_out(
    on_lustre: FakeLustre,
) -> None:
    on_lustre.give(osts=[OST, {**OST, "error": errno.EAGAIN}, OST])
    assert genuine("df", on_lustre.folder.parent).returncode == 0
    text = on_lustre.command("show", on_lustre.folder)[1]
    assert "2 OSTs, 25% full" in text
    assert len(re.findall(r"warning: OST 1 .*does not answer", text)) == 1


@pytest.mark.parametrize("fault", ["hang-df", "df-fails"])
def test_where_lfs_df_gives_nothing_it_is_asked_once_and_inactive_osts_are_told_all_the_same(
    on_lustre: FakeLustre, fault: str
) -> None:
    on_lustre.give(osts=[OST, {**OST, "state": "INACTIVE"}])
    on_lustre.fault(fault)
    code, text = on_lustre.command("show", on_lustre.folder)
    assert code == 0
    assert "warning: OST 1 is inactive" in text
    assert "how full OSTs and MDTs are is unknown: `lfs df" in text
    assert [call[0] for call in on_lustre.calls()].count("df") <= 1


def test_an_ost_that_hangs_is_waited_for_ten_seconds_at_most() -> None:
    assert lustre.lfs.time_limit_s("df") == 10.0
    assert lustre.lfs.time_limit_s("getstripe") == 30.0


def test_an_ost_without_inodes_is_warned_of(on_lustre: FakeLustre) -> None:
    on_lustre.give(osts=[OST, {**OST, "flags": "I"}, {**OST, "flags": "DN"}])
    text = on_lustre.command("show", on_lustre.folder)[1]
    assert "warning: OST 1 is out of inodes: it takes no new file (lfs df says I)" in text
    assert "warning: OST 2 is degraded and closed to new files (lfs df says DN)" in text


def test_inactive_osts_do_not_count_as_usable(on_lustre: FakeLustre) -> None:
    on_lustre.give(osts=[OST, OST, {**OST, "state": "INACTIVE"}])
    text = on_lustre.command("apply", on_lustre.folder, "-c", "3", "--dry_run")[1]
    assert "asked for 3, which is more than the 2 OSTs here" in text


# --- files without a layout


@both_dialects
@pytest.mark.parametrize("what", ["link", "no layout"])
def test_a_tar_without_a_layout_is_unknown_and_the_others_keep_their_osts(
    on_lustre: FakeLustre, what: str
) -> None:
    names = ["a", "b", "c"]
    for name in names:
        (on_lustre.folder / name).touch()
    if what == "link":
        (on_lustre.folder / "b").unlink()
        (on_lustre.folder / "b").symlink_to(on_lustre.folder / "a")
    else:
        on_lustre.give(no_layout=[str(on_lustre.folder / "b")])
    on_lustre.give(first_ost={str(on_lustre.folder / name): 4 for name in names})
    assert "b has no stripe info" in genuine("getstripe", on_lustre.folder / "b").stdout
    assert first_osts(on_lustre.folder, names) == [4, -1, 4]


def test_a_folder_behind_a_link_is_asked_for_by_its_own_name(on_lustre: FakeLustre) -> None:
    link = on_lustre.folder.parent / "link"
    link.symlink_to(on_lustre.folder)
    assert "now gives" in on_lustre.command("apply", link, "-c", "2")[1]
    code, text = on_lustre.command("show", link)
    assert code == 0
    assert "new files get plain: 2 stripes" in text


# --- pools


@pytest.mark.parametrize("options", [["--count", "4"], ["--pfl", "1G:1,-1:4"], ["--size", "8M"]])
def test_a_pool_that_the_folder_has_stays_unless_it_is_given_up(
    on_lustre: FakeLustre, options: list[str]
) -> None:
    genuine("setstripe -c 1 -p disk", on_lustre.folder)
    code, text = on_lustre.command("apply", on_lustre.folder, *options)
    assert code == 0, text
    assert "pool disk stays (--pool none would give it up)" in text
    assert read_layout(on_lustre.folder).pool == "disk"
    code, text = on_lustre.command("apply", on_lustre.folder, *options, "--pool", "none")
    assert code == 0, text
    assert "pool disk, which it had, is given up" in text
    assert read_layout(on_lustre.folder).pool == ""


def test_in_a_folder_with_a_pool_the_pools_osts_count(on_lustre: FakeLustre) -> None:
    genuine("setstripe -c 1 -p flash", on_lustre.folder)
    sizes = ["--shard_bytes", "2G", "--num_shards", "9", "--num_readers", "256"]
    text = on_lustre.command("show", on_lustre.folder, *sizes)[1]
    assert "2 of 2 OSTs at work" in text
    assert "why: at least 4 shards an OST" in text
    assert "more than the 2 OSTs in pool flash" in on_lustre.command("apply", on_lustre.folder, "-c", "9")[1]


@both_dialects
def test_a_pool_without_osts_is_refused(on_lustre: FakeLustre) -> None:
    on_lustre.give(pools={"empty": [], "disk": [1]})
    assert genuine("setstripe -c 1 -p empty", on_lustre.folder).returncode == 0, "lfs takes it"
    genuine("setstripe -d", on_lustre.folder)
    code, text = on_lustre.command("apply", on_lustre.folder, "-c", "2", "--pool", "empty")
    assert code == 73
    assert "pool empty of" in text
    assert "has no OST, expected at least one" in text


# --- words


def test_a_default_that_is_the_roots_is_not_called_the_folders_own(on_lustre: FakeLustre) -> None:
    for options, who in (("-c 4", "this default"), ("-E 1G -c 1 -E -1 -c 4", "this progressive layout")):
        genuine("setstripe -d", on_lustre.folder)
        genuine(f"setstripe {options}", on_lustre.folder)
        state = on_lustre.state()
        folder, root = str(on_lustre.folder), str(on_lustre.folder.parent)
        on_lustre.give(layouts={root: state["layouts"][folder]})
        text = on_lustre.command("show", on_lustre.folder)[1]
        assert "the file system's default; lfs does not tell whether the folder has it of its own" in text
        assert f"the site chose {who}" in on_lustre.command("apply", on_lustre.folder)[1]
        on_lustre.give(layouts={folder: state["layouts"][folder]})
        text = on_lustre.command("show", on_lustre.folder)[1]
        assert "(its own default)" in text
        words = on_lustre.command("apply", on_lustre.folder)[1]
        assert "the site" not in words


@both_dialects
def test_overstriping_is_told_and_is_another_layout(on_lustre: FakeLustre) -> None:
    genuine("setstripe -C 8", on_lustre.folder)
    assert "8 stripes of" in (text := on_lustre.command("show", on_lustre.folder)[1])
    assert "(overstriped: several on one OST)" in text
    assert "now gives new files" in on_lustre.command("apply", on_lustre.folder, "--count", "8")[1]
    if on_lustre.dialect == "2.17":
        genuine("setstripe -C -2", on_lustre.folder)
        text = on_lustre.command("show", on_lustre.folder, "--num_shards", "3", "--num_readers", "2")[1]
        assert "new files get plain: 2 stripes on every OST of" in text


def test_data_on_the_metadata_server_that_the_server_cuts_is_explained(on_lustre: FakeLustre) -> None:
    code, text = on_lustre.command("apply", on_lustre.folder, "--dom", "4M", "-c", "2")
    assert code == 73
    assert "on the metadata server up to 1 MiB, 2 stripes" in text
    assert "the server cuts what lies on the metadata server at its limit (lod.*.dom_stripesize)" in text
    assert "name --dom 1024K or less" in text
    on_lustre.give(dom_limit=4 * MIB)
    code, text = on_lustre.command("apply", on_lustre.folder, "--dom", "4M", "-c", "2")
    assert code == 0
    assert "the server may keep less than 4 MiB of a file on the metadata server" in text


def test_a_progressive_layout_may_begin_with_the_last_component(on_lustre: FakeLustre) -> None:
    assert on_lustre.command("apply", on_lustre.folder, "--pfl", "-1:8")[0] == 0
    assert on_lustre.setstripe_calls() == ["-E -1 -c 8 -S 4194304"]


# --- plan


def test_plan_stripes_large_files_alone(on_lustre: FakeLustre, prep: Prep, sample_dir: Path) -> None:
    options = ["--input_dir", sample_dir, "--model_id", prep.model_dir, "--num_shards", "5"]
    plan = ["plan", *options, "--output_dir", on_lustre.folder]
    ended = prep.command(*plan, "--stripe", "8", "--dry_run")
    assert ended.code == 0
    assert "stripe 8: new files get plain" in ended.text
    assert "would run: lfs setstripe -E 67108864 -c 1" in ended.text
    assert on_lustre.setstripe_calls() == []
    ended = prep.command(*plan, "--stripe", "8", "--stripe_size", "8M", "--stripe_pool", "disk")
    assert ended.code == 0, ended.text
    parts = read_layout(on_lustre.folder).components
    assert [(part.end_bytes, part.stripe_count) for part in parts] == [(64 * MIB, 1), (None, 6)]
    assert {(part.stripe_size_bytes, part.pool) for part in parts} == {(8 * MIB, "disk")}
    ended = prep.command(*plan, "--stripe", "4")
    assert ended.code == 0
    assert "stripe 4: left as it is, since" in ended.text
    assert "is planned already and its files keep their layouts" in ended.text
    assert len(on_lustre.setstripe_calls()) == 1


def test_plan_takes_a_layout_and_refuses_a_size_without_one(
    on_lustre: FakeLustre, prep: Prep, sample_dir: Path
) -> None:
    options = ["--input_dir", sample_dir, "--model_id", prep.model_dir, "--num_shards", "2"]
    plan = ["plan", *options, "--output_dir", on_lustre.folder]
    ended = prep.command(*plan, "--stripe_size", "8M")
    assert ended.code == 2
    assert "--stripe_size and --stripe_pool need a layout that they belong to" in ended.text
    for words, named in (
        (["1G:0,-1:8"], "component '1G:0' of --stripe asks for"),
        (["8", "--stripe_size", "5K"], "--stripe_size is 5 KiB, expected a multiple of 64 KiB"),
        (["8", "--stripe_pool", "a.b"], "--stripe_pool is 'a.b', expected a pool's own name"),
    ):
        ended = prep.command(*plan, "--stripe", *words)
        assert ended.code == 2
        assert named in ended.text
    assert prep.command(*plan, "--stripe", "-1:8").code == 0
    assert on_lustre.setstripe_calls() == ["-E -1 -c 8 -S 4194304"]


# --- setstripe that removes the folder


@both_dialects
def test_a_folder_stays_although_lfs_removes_empty_ones_after_a_refusal(on_lustre: FakeLustre) -> None:
    (on_lustre.folder / ".layout-1-0123abcd.tmp").touch()  # of a run that was killed
    inode = on_lustre.folder.stat().st_ino
    on_lustre.fault("eacces")
    code, text = on_lustre.command("apply", on_lustre.folder, "-c", "2")
    assert code == 73
    assert "Permission denied" in text
    assert on_lustre.folder.stat().st_ino == inode, "with its ACLs and project id"
    assert [path.name for path in on_lustre.folder.iterdir()] == [".layout-1-0123abcd.tmp"]
    on_lustre.fault("")
    assert on_lustre.command("apply", on_lustre.folder, "-c", "2")[0] == 0


@both_dialects
def test_a_read_only_file_system_is_named_as_the_cause(on_lustre: FakeLustre) -> None:
    on_lustre.fault("read-only")
    code, text = on_lustre.command("apply", on_lustre.folder, "-c", "2")
    assert code == 73
    assert "Read-only file system" in text
    assert "mounted read-only here: run this on a node that mounts it for writing" in text
    assert "the owner" not in text


# --- the table


def test_readers_that_cannot_keep_all_osts_busy_need_no_more_stripes() -> None:
    for num_readers, count in ((None, 4), (256, 1), (4096, 4)):
        size = DataSize(shard_bytes=2 * GIB, num_shards=5000, num_readers=num_readers)
        assert apply_flags(choose_layout(size, 2000).layout) == f"--count {count} --size 4M"


# --- existing files


def test_the_default_of_a_folder_with_files_is_set_on_request_and_the_files_keep_theirs(
    on_lustre: FakeLustre,
) -> None:
    (on_lustre.folder / "shard-00000.tar").write_bytes(b"precious")
    (on_lustre.folder / "tokenizer").mkdir()
    on_lustre.give(may_hold=[str(on_lustre.folder)])
    on_lustre.fault("empties-files")
    code, text = on_lustre.command("apply", on_lustre.folder, "-c", "4")
    assert code == 73
    assert "--existing_files_keep_theirs" in text
    code, text = on_lustre.command("apply", on_lustre.folder, "-c", "4", "--existing_files_keep_theirs")
    assert code == 0
    assert "1 file here keep their layouts, and 1 folder their defaults" in text
    assert (on_lustre.folder / "shard-00000.tar").read_bytes() == b"precious"
    assert on_lustre.setstripe_calls() == ["-c 4"]
    code, _ = on_lustre.command(
        "apply", on_lustre.folder / "shard-00000.tar", "-c", "4", "--existing_files_keep_theirs"
    )
    assert code == 73


def test_the_folders_of_jobs_and_logs_do_not_make_a_folder_full(on_lustre: FakeLustre) -> None:
    for name in ("jobs", "logs"):
        (on_lustre.folder / name).mkdir()
    on_lustre.give(may_hold=[str(on_lustre.folder)])
    assert on_lustre.command("apply", on_lustre.folder, "-c", "4")[0] == 0
    (on_lustre.folder / "jobs").rmdir()
    (on_lustre.folder / "jobs").write_text("a file of that name")
    assert on_lustre.command("apply", on_lustre.folder, "-c", "2")[0] == 73


# --- finished shards


def test_verify_and_show_warn_where_one_ost_holds_all_shards(
    on_lustre: FakeLustre, prep: Prep, sample_dir: Path
) -> None:
    prep.plan(sample_dir, on_lustre.folder, num_shards=4)
    prep.make(on_lustre.folder)
    paths = [str(on_lustre.folder / f"shard-{number:05d}.tar") for number in range(4)]
    on_lustre.give(first_ost=dict.fromkeys(paths, 3))
    ended = prep.command("verify", "--fast", on_lustre.folder)
    assert ended.code == 0
    assert json.loads((on_lustre.folder / "osts.json").read_text())["osts"] == [3, 3, 3, 3]
    assert "4 of 4 shards have plain: 1 stripe of" in ended.text
    assert "they lie on 1 of 8 OSTs; OST 3 has the most: 4 shards, " in ended.text
    assert "8 times the mean" in ended.text
    assert "warning: OST 3 has far more than its share" in ended.text
    text = on_lustre.command("show", on_lustre.folder)[1]
    assert "warning: OST 3 has far more than its share" in text
    assert "-name 'shard-*.tar' -print0 | xargs -0 -n 1 lfs migrate -c 1 -S 4194304" in text
    shards = json.loads(on_lustre.command("show", on_lustre.folder, "--json")[1])["shards"]
    num_bytes = sum(Path(path).stat().st_size for path in paths)
    assert shards["osts"] == [{"ost": 3, "num_shards": 4, "num_bytes": num_bytes}]
    assert (shards["num_osts"], shards["most_loaded_times_the_mean"], shards["is_lopsided"]) == (8, 8.0, True)
    on_lustre.give(first_ost=dict(zip(paths, [3, 1, 3, 0], strict=True)))
    ended = prep.command("verify", "--fast", on_lustre.folder)
    assert "they lie on 3 of 8 OSTs; OST 3 has the most: 2 shards" in ended.text
    assert "warning" not in ended.text


@pytest.mark.parametrize(
    ("files_by_ost", "num_osts", "is_lopsided"),
    [
        ({3: 4}, 8, True),
        ({3: 3}, 8, False),
        ({3: 4}, 1, False),  # there is no other
        ({3: 4}, 0, True),
        ({3: 3}, 0, False),
        ({0: 13, 1: 14, 2: 12, 3: 19}, 4, False),
        ({0: 10, 1: 10, 2: 10, 3: 90}, 4, True),
        ({}, 8, False),
    ],
)
def test_far_more_than_its_share_is_beyond_the_chance_of_a_few_files(
    files_by_ost: dict[int, int], num_osts: int, is_lopsided: bool
) -> None:
    balance = Balance(
        num_files=sum(files_by_ost.values()),
        layouts=(),
        bytes_by_ost={ost: 1000 * number for ost, number in files_by_ost.items()},
        files_by_ost=files_by_ost,
        num_osts=num_osts,
    )
    assert balance.is_lopsided == is_lopsided
    assert any("warning" in line for line in balance.lines()) == is_lopsided


def test_show_as_json_says_why_there_is_nothing_to_tell(on_lustre: FakeLustre, tmp_path: Path) -> None:
    file = on_lustre.folder / "file"
    file.touch()
    for path, why in ((tmp_path, "not on Lustre"), (file, "is no folder")):
        code, text = on_lustre.command("show", path, "--json")
        data = json.loads(text)
        assert (code, data["layout"], data["shards"]) == (0, None, None)
        assert why in data["why_not"]
    assert on_lustre.command("show", on_lustre.folder / "absent", "--json")[0] == 66
    assert json.loads(on_lustre.command("show", on_lustre.folder, "--json")[1])["shards"] is None


# --- the job's log


def test_a_task_says_before_its_first_write_which_layout_its_files_get(
    on_lustre: FakeLustre, prep: Prep, sample_dir: Path
) -> None:
    prep.plan(sample_dir, on_lustre.folder, num_shards=2)
    genuine_layout = [{"end": None, "count": 2, "size": MIB, "pattern": "raid0", "start": 5}]
    on_lustre.give_layout(on_lustre.folder, genuine_layout)
    ended = prep.command("--shard_id", "0", "--output_dir", on_lustre.folder)
    assert ended.code == 0
    said, _, rest = ended.text.partition("shard 00000 is done")
    assert "on Lustre, new files get plain: 2 stripes of 1 MiB, starting on OST 5" in said
    assert "all shards would fill the same place" in said
    assert rest
