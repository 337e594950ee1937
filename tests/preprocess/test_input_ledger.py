"""``plan`` says of each name in the input folder whether it is taken, and why not."""

from __future__ import annotations

import gzip
import os
import random
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.plan.listing import find_inputs
from shardprep.errors import NotFound
from shardprep.format.plan import need_plan
from tests.random_folders import PATTERNS, random_folder, wrong_of

if TYPE_CHECKING:
    from tests.conftest import Ended, Prep


def check_random_folder(folder: Path, seed: int) -> tuple[int, int]:
    """Compare the listing of a random folder with an independent one; gives the names taken and left out."""
    rng = random.Random(seed)
    folder.mkdir()
    random_folder(folder, rng)
    recursive = rng.random() < 0.8
    options: dict[str, Any] = {"recursive": recursive, "follow_links": recursive and rng.random() < 0.5}
    options["also"] = rng.choice(PATTERNS)
    try:
        listing = find_inputs(folder, **options)
    except NotFound:
        of_none = wrong_of(folder, [], {}, **options)
        assert "taken twice, or wrongly" not in (of_none or ""), f"seed {seed}, {options}: {of_none}"
        return 0, 0
    taken = [path.relative_to(folder).as_posix() for path in listing.paths]
    assert taken == sorted(taken, key=lambda path: path.split("/"))
    wrong = wrong_of(folder, taken, listing.left_out, **options)
    assert wrong is None, f"seed {seed}, {options}: {wrong}"
    return len(taken), sum(map(len, listing.left_out.values()))


def test_taken_and_left_out_are_all_names_and_each_reason_is_true(tmp_path: Path) -> None:
    counts = [check_random_folder(tmp_path / str(seed), seed) for seed in range(300)]
    assert sum(num_taken for num_taken, _ in counts) > 800
    assert sum(num_left_out for _, num_left_out in counts) > 800


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A folder in which every reason is met; a.txt and b/c.txt are what anybody would take."""
    folder = tmp_path / "raw"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name in ("a.txt", "b/c.txt", "README.txt", "notes.md", "more.md", "x.csv", ".m.jsonl", "._p.jsonl"):
        (folder / name).write_text(f"This is {name}.\n")
    (folder / ".git" / "d.txt").write_text("no text\n")
    (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "e.txt").write_text("far away\n")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "f.txt")
    (folder / "z.txt").symlink_to("/dev/zero")
    return folder


def plan_of(prep: Prep, raw: Path, out: Path, *flags: object) -> Ended:
    return prep.command("plan", "--input_dir", raw, "--output_dir", out, "--model_id", prep.model_dir, *flags)


def inputs_of(out: Path) -> list[str]:
    return [item.path for item in need_plan(out).inputs]


def test_plan_names_and_counts_what_it_leaves_out_and_plan_json_has_all_of_it(
    prep: Prep, raw: Path, tmp_path: Path
) -> None:
    ended = plan_of(prep, raw, tmp_path / "data")
    assert ended.code == 0, ended.text
    for line in (
        "left out (AppleDouble): 1, such as ._p.jsonl",
        "left out (FIFO, socket or device): 2, such as f.txt, z.txt",
        "left out (file of a repository): 1, such as README.txt; --also 'README.txt' takes it",
        "left out (folder): 1, such as b; for what it holds add --recursive",
        "left out (hidden): 2, such as .git, .m.jsonl; rename what is an input",
        "left out (link to a folder): 1, such as linked; for what it holds add --recursive --follow_links",
        "left out (note of datasets): 1, such as dataset_info.json",
    ):
        assert line in ended.text.splitlines(), ended.text
    unknown = (
        "left out (unknown suffix: .md 2, .csv 1): 3, such as more.md, notes.md, x.csv; --also '*.md' takes"
    )
    assert f"{unknown} such files, as plain text\n" in ended.text
    assert need_plan(tmp_path / "data").left_out == {
        "AppleDouble": ["._p.jsonl"],
        "FIFO, socket or device": ["f.txt", "z.txt"],
        "file of a repository": ["README.txt"],
        "folder": ["b"],
        "hidden": [".git", ".m.jsonl"],
        "link to a folder": ["linked"],
        "note of datasets": ["dataset_info.json"],
        "unknown suffix": ["more.md", "notes.md", "x.csv"],
    }
    assert inputs_of(tmp_path / "data") == ["a.txt"]


def test_flags_take_what_is_left_out_without_them(prep: Prep, raw: Path, tmp_path: Path) -> None:
    flags = ("--recursive", "--follow_links", "--also", "*.md, readme*")
    ended = plan_of(prep, raw, tmp_path / "data", *flags)
    assert ended.code == 0, ended.text
    assert inputs_of(tmp_path / "data") == [
        "README.txt", "a.txt", "b/c.txt", "linked/e.txt", "more.md", "notes.md"
    ]  # fmt: skip
    prep.make(tmp_path / "data")
    members = prep.members(tmp_path / "data" / "shard-00004.tar")
    assert ("sample_4_00000000.text.txt", b"This is more.md.") in members
    again = plan_of(prep, raw, tmp_path / "data", *flags)
    assert again.code == 0, again.text


@pytest.mark.parametrize(
    "name",
    [
        "B.JSONL",
        "c.TXT",
        "e.text",
        "f.JsonLines",
        "g.Jsonl.ZSTD",
        "h.txt.GZIP",
        "d.Parquet",
        "e.pq",
        "f.Feather",
    ],
)
def test_suffixes_are_known_in_any_case_and_by_their_usual_synonyms(
    prep: Prep, tmp_path: Path, name: str
) -> None:
    (tmp_path / "raw").mkdir()
    path, kind = tmp_path / "raw" / name, name.lower()
    data = b'{"text": "one"}\n' if "json" in kind else b"one\n"
    if kind.endswith(("parquet", "pq", "feather")):
        table = pytest.importorskip("pyarrow").table({"text": ["one"]})
        if kind.endswith("feather"):
            pytest.importorskip("pyarrow.feather").write_feather(table, path)
        else:
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
    elif kind.endswith("zstd"):
        path.write_bytes(pytest.importorskip("zstandard").compress(data))
    else:
        path.write_bytes(gzip.compress(data) if kind.endswith("gzip") else data)
    assert plan_of(prep, tmp_path / "raw", tmp_path / "data").code == 0
    prep.make(tmp_path / "data")
    texts = [text for key, text in prep.members(tmp_path / "data" / "shard-00000.tar") if "text" in key]
    assert texts == [b"one"]


def test_flags_that_took_nothing_are_not_in_the_plan(prep: Prep, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.txt").write_text("a\n")
    flags = ("--recursive", "--follow_links", "--also", "*.md")
    assert plan_of(prep, tmp_path / "raw", tmp_path / "data", *flags).code == 0
    refused = plan_of(prep, tmp_path / "raw", tmp_path / "data", *flags[1:])
    assert refused.code == 2
    assert "--follow_links is for subfolders; add --recursive" in refused.text
    options = need_plan(tmp_path / "data").options
    assert (options.also, options.follow_links) == ("", False)


def test_a_data_set_among_its_own_inputs_is_refused(prep: Prep, raw: Path) -> None:
    options = ["--input_dir", raw, "--model_id", prep.model_dir, "--num_shards", 1, "--output_dir"]
    same = prep.command("plan", *options, raw / ".." / raw.name)
    assert (same.code, "--input_dir" in same.text) == (2, True)
    below = prep.command("plan", *options, raw / "made", "--recursive")
    assert (below.code, "--recursive" in below.text) == (2, True)
    assert not (raw / "made").exists()
    assert prep.command("plan", *options, raw / "made").code == 0


def test_links_to_files_and_empty_files_are_inputs_and_counted(prep: Prep, raw: Path, tmp_path: Path) -> None:
    (raw / "l.txt").symlink_to(tmp_path / "elsewhere" / "e.txt")
    (raw / "empty.txt").touch()
    ended = plan_of(prep, raw, tmp_path / "data")
    assert f"3 input files in {raw}, 1 of them links" in ended.text
    assert "1 of them hold nothing, such as empty.txt" in ended.text
    assert inputs_of(tmp_path / "data") == ["a.txt", "empty.txt", "l.txt"]


def test_links_that_lead_round_or_to_a_folder_twice_take_each_folder_once(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    (raw / "z").mkdir(parents=True)
    (raw / "z" / "a.txt").write_text("a\n")
    (raw / "a").symlink_to("z")
    (raw / "z" / "up").symlink_to(raw)
    listing = find_inputs(raw, recursive=True, follow_links=True)
    assert [path.relative_to(raw).as_posix() for path in listing.paths] == ["z/a.txt"]
    assert listing.left_out == {"folder that is taken already": ["a", "z/up"]}


def test_a_link_to_nothing_that_is_named_as_an_input_ends_plan(prep: Prep, raw: Path, tmp_path: Path) -> None:
    (raw / "gone.jsonl").symlink_to("nowhere")
    ended = plan_of(prep, raw, tmp_path / "data")
    assert ended.code == 66
    assert "gone.jsonl cannot be opened: it is a link to nothing" in ended.text


def test_a_socket_and_a_name_that_is_no_utf_8_or_not_printable_are_named(
    prep: Prep, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(raw)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.txt")
        (raw / "\x1b[2J.md").touch()
        Path(os.fsdecode(b"\xff.md")).touch()
        ended = plan_of(prep, raw, tmp_path / "data")
    assert ended.code == 0, ended.text
    assert "left out (FIFO, socket or device): 3, such as f.txt, s.txt, z.txt" in ended.text
    assert "'\\x1b[2J.md'" in ended.text
    assert "\x1b" not in ended.text
    assert {"\x1b[2J.md", "\\xff.md"} <= set(need_plan(tmp_path / "data").left_out["unknown suffix"])


def test_the_plain_form_takes_the_nth_of_all_txt_files_that_are_not_hidden(
    prep: Prep, tmp_path: Path
) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    for name in ("a.txt", "README.txt", "requirements.txt", ".hidden.txt", "notes.md"):
        (raw / name).write_text(f"This is {name}.\n")
    flags = ("--input_dir", raw, "--output_dir", tmp_path / "data", "--model_id", prep.model_dir)
    for number, name in enumerate(sorted(path.name for path in raw.glob("[!.]*.txt"))):
        ended = prep.command("--shard_id", number, *flags)
        assert ended.code == 0, ended.text
        members = prep.members(tmp_path / "data" / f"shard-{number:05d}.tar")
        assert (f"sample_{number}_00000000.text.txt", f"This is {name}.".encode()) in members
    assert number == 2
