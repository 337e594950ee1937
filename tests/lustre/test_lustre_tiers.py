"""Layouts that a site made for its tiers, and wrappers that cap or add options."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from lustre.layout import read_layout
from tests.lustre.fake_lustre import FakeLustre, both_dialects

pytestmark = pytest.mark.processes

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Prep

ORION = (
    "-E 256K -L mdt -E 8M -c 1 -S 1M -p flash -E -1 -c 4 -S 1M -p disk"  # the shape of OLCF Orion's default
)
TWO_POOLS = "-E 8M -c 1 -S 1M -p flash -E -1 -c 4 -S 1M -p disk"
MDT = "-E 256K -L mdt -E -1 -c 1 -S 1M"


def genuine(options: str, path: Path) -> None:
    subprocess.run(["lfs", "setstripe", *options.split(), str(path)], check=True)


@pytest.mark.parametrize(
    ("tiers", "lost", "pool"),
    [
        (ORION, "data on the metadata server up to 256 KiB, pool flash, pool disk", "disk"),
        (TWO_POOLS, "pool flash, pool disk", "disk"),
        (MDT, "data on the metadata server up to 256 KiB", "none"),
    ],
)
def test_tiers_are_not_replaced_unless_a_pool_is_named(
    on_lustre: FakeLustre, prep: Prep, sample_dir: Path, tiers: str, lost: str, pool: str
) -> None:
    genuine(tiers, on_lustre.folder)
    before = read_layout(on_lustre.folder)
    plan = ["plan", "--input_dir", sample_dir, "--model_id", prep.model_dir, "--num_shards", "2"]
    plan += ["--output_dir", on_lustre.folder, "--stripe", "8"]
    for words in (["--count", "8"], ["--pfl", "1G:1,-1:8"], ["--count", "8", "--dry_run"]):
        code, text = on_lustre.command("apply", on_lustre.folder, *words)
        assert code == 73
        assert f"would drop {lost} without a word" in text
        assert "the advice for files below 512 GB" in text
        assert f"--stripe_pool {pool} of plan, or --pool {pool} of apply" in text
    ended = prep.command(*plan)
    assert ended.code == 73
    assert f"--stripe_pool {pool} of plan" in ended.text
    assert read_layout(on_lustre.folder) == before
    ended = prep.command(*plan, "--stripe_pool", pool)
    assert ended.code == 0, ended.text
    assert "given up: " in ended.text
    after = read_layout(on_lustre.folder)
    assert (after.has_tiers, after.pool) == (False, "" if pool == "none" else pool)


def test_show_prints_a_command_that_names_the_pool_of_large_files(on_lustre: FakeLustre) -> None:
    genuine(ORION, on_lustre.folder)
    text = on_lustre.command("show", on_lustre.folder, "--shard_bytes", "2G", "--num_shards", "500")[1]
    assert "but somebody chose this progressive layout: left alone" in text
    assert "--count 1 --size 4M --pool disk" in text


def test_data_on_the_metadata_server_stays_where_it_is_named_again(on_lustre: FakeLustre) -> None:
    genuine(MDT, on_lustre.folder)
    code, text = on_lustre.command("apply", on_lustre.folder, "--dom", "256K", "--count", "4")
    assert code == 0, text
    assert read_layout(on_lustre.folder).on_mdt is not None


@both_dialects
def test_a_stripe_on_every_ost_that_a_wrapper_caps_is_accepted_and_said(on_lustre: FakeLustre) -> None:
    on_lustre.give(count_cap=450)
    for _ in range(2):
        code, text = on_lustre.command("apply", on_lustre.folder, "-c", "-1")
        assert code == 0, text
        assert "asked for a stripe on every OST, got 450 stripes: a site's wrapper" in text
    assert "has it already" in text
    assert len(on_lustre.setstripe_calls()) == 1


def test_a_pool_that_a_wrapper_adds_is_said(on_lustre: FakeLustre) -> None:
    on_lustre.fault("wrapper-pool")
    code, text = on_lustre.command("apply", on_lustre.folder, "-c", "2")
    assert code == 0
    assert "pool disk was added, which nobody asked for" in text


# --- show


def test_the_way_to_end_a_start_is_one_that_works_in_a_folder_with_shards(on_lustre: FakeLustre) -> None:
    for held in (False, True):
        if held:
            (on_lustre.folder / "shard-00000.tar").touch()
            on_lustre.give(may_hold=[str(on_lustre.folder)])
        subprocess.run(["lfs", "setstripe", "-c", "2", "-i", "3", str(on_lustre.folder)], check=True)
        text = on_lustre.command("show", on_lustre.folder)[1]
        (line,) = [line for line in text.splitlines() if "every new file lies starting on OST 3" in line]
        command = line.partition("shardprep lustre apply ")[2]
        assert command.endswith("--count 2" + " --existing_files_keep_theirs" * held)
        code, text = on_lustre.command("apply", on_lustre.folder, *command.rpartition("' ")[2].split())
        assert code == 0, text
        assert read_layout(on_lustre.folder).fixed_place == ""


def test_one_shard_and_one_ost_are_singular(on_lustre: FakeLustre) -> None:
    (on_lustre.folder / "shard-00000.tar").write_bytes(bytes(7000))
    text = on_lustre.command("show", on_lustre.folder, "--num_shards", "1", "--shard_bytes", "1G")[1]
    assert "1 of 1 shard have plain: 1 stripe" in text
    assert "they lie on 1 of 8 OSTs; OST 0 has the most: 1 shard, 7.00 kB, 8 times the mean" in text
    assert "for 1 shard of 1 GiB" in text
