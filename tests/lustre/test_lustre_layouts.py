"""What the lustre package reads and chooses, without any lfs: pure functions of text and numbers."""

from __future__ import annotations

import pytest

from lustre.apply import is_as_asked
from lustre.layout import (
    MANY,
    ROWS,
    DataSize,
    Layout,
    apply_flags,
    choose_layout,
    load_text,
    parse_layout,
    parse_layout_options,
    setstripe_options,
    size_flag,
    size_text,
)
from lustre.lfs import Mount, mount_of
from lustre.show import first_ost, split_by_file
from lustre.space import parse_df
from shardprep.command_line import parse_size
from shardprep.errors import LustreError, UsageError

MIB, GIB = 1 << 20, 1 << 30
DF = """UUID                   1K-blocks        Used   Available Use% Mounted on
fakefs-MDT0000_UUID     67108864    16777216    50331648  25% /mnt[MDT:0] 
fakefs-OST0001_UUID   1073741824   268435456   805306368  25% /mnt a[OST:9][OST:1] 
fakefs-OST0002_UUID   1073741824  1073741824           0 100%  /mnt[OST:2] 
fakefs-OST0003_UUID   1073741824   268435456   805306368  25% /mnt[OST:3] DRS
fakefs-OST0004_UUID : inactive device

filesystem_summary:   7516192768  2684354560  4831838208  36%  /mnt 
"""  # noqa: W291  lfs itself leaves blanks at the ends


def wanted(**options: str) -> Layout:
    layout = parse_layout_options(**options)
    assert layout is not None
    return layout


def test_lfs_df_is_read_by_ost_with_its_flags_whatever_the_mount_point() -> None:
    osts = parse_df(DF).osts
    assert [(ost.name, ost.flags, ost.is_out_of_space) for ost in osts] == [
        ("OST 1", "", False),
        ("OST 2", "", True),
        ("OST 3", "DRS", True),
    ]
    assert osts[0].used_bytes + osts[0].free_bytes == 1 << 40
    assert [round(ost.fill, 2) for ost in osts] == [0.25, 1.0, 0.25]
    (mdt,) = parse_df(DF).mdts
    assert (mdt.name, mdt.fill, mdt.free_inodes) == ("MDT 0", 0.25, None)
    assert parse_df("").lines() == [
        f"lfs df names no {kind}; how full they are is unknown" for kind in ("OST", "MDT")
    ]


def test_the_file_systems_name_is_read_off_the_mounts_source() -> None:
    for source in ("10.0.0.1@tcp:/fakefs", "a@o2ib,b@o2ib:c@o2ib:/fakefs/projects/x"):
        assert Mount(source=source, mount_point="/m", fs_type="lustre").fs_name == "fakefs"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4M", 4 * MIB), ("4mb", 4 * MIB), ("4MiB", 4 * MIB), ("4194304", 4 * MIB), ("2G", 2 * GIB), ("1", 1)],
)
def test_sizes_are_binary_and_a_bare_number_is_bytes(text: str, num_bytes: int) -> None:
    assert parse_size(text, "--size") == num_bytes
    assert parse_size(size_flag(num_bytes), "--size") == num_bytes


@pytest.mark.parametrize("text", ["", "M", "4 M", "1.5G", "-1", "128b", "1e6", "4KiBB", "٤M"])
def test_a_size_that_lfs_or_a_person_could_take_otherwise_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--size is .*expected a number of bytes"):
        parse_size(text, "--size")
    assert size_text(0) == "0 bytes"


def test_what_is_not_named_is_left_to_the_file_system_in_a_plain_layout_alone() -> None:
    assert parse_layout_options() is None
    assert setstripe_options(wanted(count="8")) == ["-c", "8"]
    assert setstripe_options(wanted(size="64K")) == ["-S", "65536"]
    assert setstripe_options(wanted(pool="flash")) == ["-p", "flash"]
    for layout in (wanted(pfl="1G:1,-1:8"), wanted(dom="64K", count="2")):
        options = setstripe_options(layout)
        assert options.count("-S") == sum(part.pattern != "mdt" for part in layout.components)


# the table of facts: size of a shard, number of shards on 8 OSTs -> options
@pytest.mark.parametrize(
    ("shard_bytes", "num_shards", "flags", "source"),
    [
        (99_999_999, 1, "--count 1 --size 4M", "OLCF"),
        (100_000_000, 1, "--count 1 --size 4M", "nersc"),
        (GIB - 1, 9999, "--count 1 --size 4M", "Azure"),
        (GIB, MANY * 8, "--count 1 --size 4M", "nersc"),
        (2 * GIB, 500, "--count 1 --size 4M", "an inference"),
        (GIB, MANY * 8 - 1, "--count 4 --size 4M", "wiki.lustre.org"),
        (4 * GIB - 1, None, "--count 4 --size 4M", "wiki.lustre.org"),
        (4 * GIB, 500, "--count 4 --size 4M", "fsx"),
        (10 * GIB - 1, 8, "--count 8 --size 4M", "wiki.lustre.org"),
        (10 * GIB, 500, "--pfl '1G:1,10G:4,-1:8' --size 4M", "composed"),
        (None, 500, "--pfl '1G:1,10G:4,-1:8' --size 4M", "composed"),
    ],
)
def test_every_row_of_the_table(
    shard_bytes: int | None, num_shards: int | None, flags: str, source: str
) -> None:
    choice = choose_layout(DataSize(shard_bytes=shard_bytes, num_shards=num_shards), 8)
    assert apply_flags(choice.layout) == flags
    assert source in choice.lines[2]


def test_the_table_ascends_and_every_row_is_reached() -> None:
    assert [row.below_bytes for row in ROWS] == sorted(row.below_bytes for row in ROWS)
    reached = {
        choose_layout(DataSize(shard_bytes=row.below_bytes - 1, num_shards=number), 8).lines[1]
        for row in ROWS
        for number in (1, 9999)
    }
    assert reached == {f"  why: {row.why}" for row in ROWS}


def test_no_count_is_chosen_above_the_osts_there_are() -> None:
    choice = choose_layout(DataSize(), 2)
    assert apply_flags(choice.layout) == "--pfl '1G:1,10G:2,-1:2' --size 4M"
    unknown = choose_layout(DataSize(shard_bytes=5 * GIB, num_shards=9), 0)
    assert unknown.layout.components[0].stripe_count == 4


def test_the_load_is_told_by_the_stripes_that_a_shard_of_that_size_has() -> None:
    layout = wanted(pfl="1G:1,-1:4")

    def load(layout: Layout, shard_bytes: int) -> str:
        return load_text(layout, DataSize(shard_bytes=shard_bytes, num_shards=4, num_readers=16), 8)

    assert "4 of 4 shards open at once: 4 of 8 OSTs" in load(layout, MIB)
    assert "8 of 8 OSTs at work, about 2 readers" in load(layout, 2 * GIB)
    assert "4 readers share a shard" in load(wanted(count="-1"), MIB)


def test_a_count_above_the_osts_is_found_either_as_asked_or_as_all_of_them() -> None:
    asked = wanted(pfl="1G:1,-1:100", pool="flash")
    for count, is_right in (("100", True), ("2", True), ("8", False), ("1", False)):
        found = wanted(pfl=f"1G:1,-1:{count}", pool="flash")
        assert is_as_asked(asked, found, {"flash": 2}) == is_right, count
    every = wanted(count="-1")
    assert is_as_asked(every, wanted(count="450"), {"": 450}), "a site's wrapper caps it"
    assert not is_as_asked(every, wanted(count="1"), {"": 8})


def test_another_end_or_place_of_a_component_is_another_layout() -> None:
    asked = wanted(dom="64K", pfl="1G:1,-1:8")
    assert is_as_asked(asked, asked, {"": 8})
    for other in (wanted(dom="128K", pfl="1G:1,-1:8"), wanted(pfl="64K:1:64K,1G:1,-1:8")):
        assert not is_as_asked(asked, other, {"": 8})


def test_the_longest_and_last_mount_point_wins() -> None:
    table = "a / ext4 rw\nb /data lustre rw\nc /data/x nfs rw\nd /data/x lustre rw\ne /da tmpfs rw\nbroken\n"
    paths = ("/", "/data", "/data/x/y", "/database", "/data/xy")
    mounts = {path: mount_of(path, table) for path in paths}
    sources = {path: mount and mount.source for path, mount in mounts.items()}
    assert sources == {
        "/": "a",
        "/data": "b",
        "/data/x/y": "d",
        "/database": "a",
        "/data/xy": "b",
    }
    assert mount_of("/anything", "") is None


def test_the_classic_line_of_a_directory_is_read_with_an_empty_pattern_too() -> None:
    line = "stripe_count:  2 stripe_size:   4194304 pattern:       raid0 stripe_offset: -1"
    layout = parse_layout(line)
    assert (layout.components[0].stripe_count, layout.components[0].stripe_size_bytes) == (2, 4 * MIB)
    assert not layout.is_inherited
    assert parse_layout(line.replace("raid0", "")).is_inherited
    assert parse_layout(line.replace("raid0", "0")).is_inherited


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
        "2 stripes of 1 MiB in pool flash, on OST 5 from there on"
    )


GETSTRIPE = """/mnt/a b/shard-00000.tar
lmm_stripe_count:  4
lmm_stripe_size:   1048576
lmm_pattern:       raid0
lmm_layout_gen:    0
lmm_stripe_offset: 3
\tobdidx\t\t objid\t\t objid\t\t group
\t     3\t            12\t          0xc\t   0x280000400
\t     5\t            12\t          0xc\t   0x2c0000400

/mnt/pfl
  lcm_layout_gen:    2
  lcm_mirror_count:  1
  lcm_entry_count:   2
    lcme_id:             1
    lcme_mirror_id:      0
    lcme_flags:          init
    lcme_extent.e_start: 0
    lcme_extent.e_end:   268435456
      lmm_stripe_count:  1
      lmm_stripe_size:   4194304
      lmm_pattern:       raid0
      lmm_layout_gen:    0
      lmm_stripe_offset: 6
      lmm_objects:
      -   0: { l_ost_idx:   6, l_fid: [0x280000400:0xc:0x0] }

    lcme_id:             2
    lcme_flags:          0
    lcme_extent.e_end:   EOF
      lmm_stripe_count:  -1
      lmm_pattern:       raid0
      lmm_stripe_offset: -1

/mnt/dom of 2.15
    lcme_id:             1
      lmm_stripe_count:  0
      lmm_pattern:       mdt
      lmm_stripe_offset: 0

    lcme_id:             2
      lmm_stripe_count:  1
      lmm_pattern:       raid0
      lmm_stripe_offset: 7

/mnt/dom of 2.17, nothing behind it
    lcme_id:             1
      lmm_stripe_count:  0
      lmm_pattern:       mdt
      lmm_mdt_index:     0

    lcme_id:             2
      lmm_stripe_count:  1
      lmm_pattern:       raid0,overstriped
      lmm_stripe_offset: -1

"""


def test_the_first_ost_is_read_of_plain_and_progressive_files_and_past_the_metadata_server() -> None:
    names = ["a b/shard-00000.tar", "pfl", "dom of 2.15", "dom of 2.17, nothing behind it"]
    paths = [f"/mnt/{name}" for name in names]
    layouts = [parse_layout(part) for part in split_by_file(GETSTRIPE, paths)]
    assert [first_ost(layout) for layout in layouts] == [3, 6, 7, -1]
    assert [layout.components[0].osts for layout in layouts] == [(3, 5), (6,), (), ()]
    for output in ("", "lmm_stripe_offset: 3\n"):
        with pytest.raises(LustreError, match="expected the layouts of /mnt/a b"):
            split_by_file(output, paths)
