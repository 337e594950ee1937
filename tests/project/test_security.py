"""Promises of SECURITY.md that no other test covers, and a check that the tests it names exist.

For example, neither a name in a file of a data set nor a link in it leads a command to another folder.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import pickle
import random
import re
import shutil
import struct
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import BrokenShard, NotFound, ShardprepError, get_llama3_dataloader
from tests.checkout import ROOT
from tests.external_tars import write_tar
from tests.forged import rewrite_plan
from tests.random_inputs import PACKERS
from tests.slurm.fake_slurm import Desk, ended, install_fake_slurm
from tests.world import World, open_loader, refuses, tokenizer_dir

pytestmark = pytest.mark.long

SECRETS = {
    "HF_TOKEN": "hf_secretOfTheHub0123456789",
    "AWS_SECRET_ACCESS_KEY": "secretOfTheCloud/0123456789",
    "WANDB_API_KEY": "secretOfTheRuns0123456789",
}


class RunsCode:
    """An object that creates a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("marker",)


PICKLED = ("index.json", "plan.json", *(f"shard-00000.{suffix}" for suffix in ("idx", "json")))
MEMBERS = ("token_ids.npy", "pyd", "pickle")  # of a sample in a tar


@pytest.mark.parametrize("name", [*PICKLED, *MEMBERS])
def test_no_pickle_is_ever_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Neither as a file nor in a member of a tar, where webdataset's decoder would open it."""
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(RunsCode())
    pickle.loads(pickled)
    Path("marker").rmdir()  # shows that unpickling creates it
    world = World(tmp_path).raw({"a.txt": "a line\n" * 9}).make(num_shards=1)
    shards: list[Any] = [world.data_dir]
    if name in MEMBERS:
        header = io.BytesIO()  # as numpy.save begins an array of objects; the pickle is its content
        np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (1,)})
        data = header.getvalue() + pickled if name.endswith(".npy") else pickled
        shards = [write_tar(tmp_path / "a.tar", [{name: data}])]
    else:
        (world.data_dir / name).write_bytes(pickled)
    if name == "shard-00000.json":
        (world.data_dir / "index.json").unlink()  # it would be read instead of the manifests
    if name == "plan.json":
        world.main("verify", world.data_dir).ends(65)
    else:
        with pytest.raises(ShardprepError), open_loader(shards, 1, model_id=tokenizer_dir()) as loader:
            list(loader)
    assert not Path("marker").exists()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["../outside", "/tmp/shardprep_outside", "a/../../outside", "./../outside"])
def test_a_member_that_names_a_place_elsewhere_is_never_written_there(tmp_path: Path, name: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    write_tar(inner / "a.tar", [{"__key__": name, "token_ids.json": b"[1, 2]"}])
    url = f"pipe:cat {inner}/a.tar"
    for shards, options in (([inner / "a.tar"], {}), ([url], {"cache_dir": inner / "cache"})):
        with get_llama3_dataloader(shards, 1, tokenizer_dir(), num_workers=0, **options) as loader:  # type: ignore[arg-type]
            assert next(iter(loader))["input_ids"].tolist() == [[1, 2]]
    assert not Path("/tmp/shardprep_outside.token_ids.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner"]
    assert len(list(inner.rglob("*.tar"))) == 2


@pytest.mark.processes
def test_no_file_or_message_contains_secrets_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    world = World(tmp_path).raw({"a.txt": "a line\n" * 9})
    said = [world.try_plan(num_shards=1).ends(0)]
    said += [world.main(command, world.data_dir).ends(0) for command in ("run", "verify")]
    written = [path.read_bytes() for path in world.data_dir.rglob("*") if path.is_file()]
    assert len(written) >= 6
    for content in [*written, *(each.text.encode() for each in said)]:
        assert not any(secret.encode() in content for secret in SECRETS.values())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:secret@127.0.0.1:9/a.tar", "http://127.0.0.1:9/a.tar"),
        ("http://127.0.0.1:9/a.tar?X-Amz-Signature=secret#secret", "http://127.0.0.1:9/a.tar?..."),
        ("pipe:false -H 'Authorization: Bearer secret' /a.tar", "pipe:false ..."),
    ],
)
def test_no_error_contains_secrets_of_a_url(tmp_path: Path, url: str, shown: str) -> None:
    with pytest.raises(NotFound) as caught:
        get_llama3_dataloader([url], 1, tokenizer_dir(), num_workers=0, cache_dir=tmp_path)
    assert shown in str(caught.value)
    error: BaseException | None = caught.value
    while error is not None:
        assert "secret" not in str(error)
        error = error.__cause__
    assert not any("secret" in path.name for path in tmp_path.rglob("*"))


def test_each_test_that_the_page_names_exists() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    names = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(names) >= 20
    for file, name in names:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_each_promise_of_the_page_names_a_test_and_each_door_its_module() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    promises = [
        row for row in rows if "promise" not in row[1] and "protection" not in row[1] and "---" not in row[1]
    ]
    assert len(promises) >= 30
    assert [row[0] for row in promises if not re.search(r"`tests/[\w/]+\.py::test_\w+`", row[-1])] == []
    modules = {module for row in promises for module in re.findall(r"[\w/]+/\w+\.py", row[0])}
    assert len(modules) >= 5
    assert {module for module in modules if not (ROOT / module).is_file()} == set()


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst"])
def test_a_decompression_bomb_takes_no_more_memory_than_another_file(tmp_path: Path, ending: str) -> None:
    """8 MB of long lines. Only Python's allocations are counted."""
    peaks = []
    for num_lines in (10, 140):
        text = (b"a line that is the same again and again, so that it packs; " * 1000 + b"\n") * num_lines
        packed = PACKERS[ending](text, random.Random(2))
        world = World(tmp_path / str(num_lines)).raw({f"a.txt{ending}": packed})
        tracemalloc.start()
        world.plan(num_shards=1, limit=2)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + (4 << 20)


def xz_with_a_large_dictionary() -> bytes:
    """Return an xz file that declares a dictionary of 4 GiB."""
    data = bytearray(lzma.compress(b"a line\n" * 10, preset=0))
    begin = 12  # offset of a block's header
    end = begin + 4 * (data[begin] + 1) - 4
    data[begin + 4] = 40
    data[end : end + 4] = struct.pack("<I", zlib.crc32(data[begin:end]))
    return bytes(data)


DECLARED: dict[str, bytes] = {
    # A window of 2 TiB, and 2**60 bytes of content.
    "window.txt.zst": struct.pack("<IBBQ", 0xFD2FB528, 0b1100_0000, 31 << 3, 1 << 60) + b"\x01\x00\x00",
    "dictionary.txt.xz": xz_with_a_large_dictionary(),
    "name.txt.gz": b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (8 << 20),  # a name that never ends
    "footer.parquet": b"PAR1" + bytes(1000) + struct.pack("<I", (1 << 31) - 1) + b"PAR1",
    "schema.arrow": struct.pack("<II", 0xFFFFFFFF, (1 << 31) - 8) + bytes(1000),
}


@pytest.mark.parametrize("name", DECLARED)
def test_an_input_that_declares_gigabytes_is_refused(tmp_path: Path, name: str) -> None:
    world = World(tmp_path).raw({name: DECLARED[name]})
    assert (world.try_plan().code or world.try_shard(0).code) == 65


SECRET = b"a secret that nobody may read into a shard\n" * 40
ELSEWHERE = {
    "a.txt": (
        "../secret.txt", "sub/../../secret.txt", "{abs}", "../raw/../secret.txt", "sub/..", "..", ".", "",
    ),
    "tokenizer_config.json": ("../../secret", "../secret", "/secret", "sub/secret", "..", "", "."),
}  # fmt: skip


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A plan whose shard has files in all subfolders, and a secret with the size and times of an input."""
    lines = [f'{{"text": "text {number}", "id": "{number}"}}' for number in range(60)]
    world = World(tmp_path_factory.mktemp("planned")).raw({
        "a.txt": SECRET.replace(b"a secret", b"the data"), "b.jsonl": "\n".join([*lines, "no json"]),
        "sub/c.txt": "a\n",
    })  # fmt: skip
    secret, status = world.raw_dir.with_name("secret.txt"), (world.raw_dir / "a.txt").stat()
    secret.write_bytes(SECRET)
    os.utime(secret, ns=(status.st_atime_ns, status.st_mtime_ns))
    return world.plan(num_shards=1, id_field="id", digests=True, max_bad_fraction=0.5)


@pytest.fixture
def world(planned: World, tmp_path: Path) -> World:
    return planned.copy(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A target of links, like another data set; one file is two days old."""
    (tmp_path / "other" / "attempts").mkdir(parents=True)
    names = ("shard-00000.jsonl", "shard-00000.digests", ".shard-00000.jsonl.host-1-00000000.tmp")
    for path in (tmp_path / "other" / name for name in names):
        path.write_text("another data set's\n")
    os.utime(path, (time.time() - 48 * 3600,) * 2)
    return tmp_path / "other"


def link(world: World, name: str, to: Path) -> Path:
    """Create a link in the data set."""
    path = world.data_dir / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(to)
    return path


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, names in ELSEWHERE.items() for new in names])
def test_a_name_in_a_plan_that_leads_elsewhere_is_refused_by_every_command(
    world: World, tmp_path: Path, old: str, new: str
) -> None:
    """The name of an input or of a tokenizer's file, with updated hashes."""
    data, new = world.data_dir, new.format(abs=world.raw_dir.with_name("secret.txt"))
    rewrite_plan(data / "plan.json", json.dumps(old), json.dumps(new))
    ends = [world.main(command, data) for command in ("run", "verify", "peek")]
    export = world.main("export", data, to="nanogpt", output_dir=tmp_path / "out")
    for done in (world.try_shard(0), export, *ends):
        # A command that looks for shards first ends with 66.
        assert done.code == 66 or (done.code == 65 and "plan.json" in done.err), done.text
    assert not list(data.glob("*.tar"))
    assert not any(b"secret" in path.read_bytes() for path in data.glob("shard-*"))
    assert not list(tmp_path.rglob("*secret*"))


@pytest.mark.processes
def test_links_to_inputs_are_followed_and_links_in_a_data_set_are_not(tmp_path: Path) -> None:
    """``cp -rs`` makes a data set of links. The folder itself may be named by a link."""
    (tmp_path / "real.txt").write_bytes(SECRET)
    world = World(tmp_path)
    (world.raw_dir / "a.txt").symlink_to(tmp_path / "real.txt")
    world.plan(num_shards=1)
    world.main("run", world.data_dir).ends(0)
    (tmp_path / "named").symlink_to(world.data_dir)
    world.main("verify", tmp_path / "named").ends(0)
    farm = tmp_path / "farm"
    shutil.copytree(world.data_dir, farm, copy_function=lambda old, new: Path(new).symlink_to(old))
    for command in ("verify", "status", "peek"):
        world.main(command, farm).ends(65, "plan.json", "a link to")
    with refuses(BrokenShard, path=farm / "plan.json"):
        open_loader(farm)


LINKED: list[Any] = [
    *((names, "shard", 73) for names in ("ids", "digests", "quarantine")),
    *((names, "clean", 0) for names in ("ids", "digests", "quarantine", "jobs", "blanked", "overlap")),
    ("overlap", "overlap", 73),
]
LINKED_OF_PROCESSES = [
    # run fails here, so it would keep its record.
    *((names, "run", 73) for names in ("quarantine", "jobs ids", "jobs/attempts ids")),
    ("jobs", "submit", 73),
    ("jobs/logs", "submit", 73),
    ("jobs/history.jsonl", "submit", 0),
]
LINKED += [pytest.param(*row, marks=pytest.mark.processes) for row in LINKED_OF_PROCESSES]


@pytest.fixture
def desk(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(data=world.data_dir, place=install_fake_slurm(tmp_path, monkeypatch))


@pytest.mark.parametrize(("names", "command", "code"), LINKED)
def test_no_command_writes_or_removes_anything_through_a_link(
    desk: Desk, world: World, other: Path, names: str, command: str, code: int
) -> None:
    to = {"jobs/history.jsonl": other / "shard-00000.jsonl"}
    paths = [link(world, name, to.get(name, other)) for name in names.split()]
    before = {path: path.is_dir() or path.read_text() for path in other.rglob("*")}
    words = ["--against", world.raw_dir, "--ngram=2"] if command == "overlap" else []
    done = world.try_shard(0) if command == "shard" else world.main(command, world.data_dir, *words)
    done.ends(code, *(paths[:1] if code and command != "run" else ()))
    assert {path: path.is_dir() or path.read_text() for path in other.rglob("*")} == before
    assert bool(desk.sent()) == ((command, code) == ("submit", 0))


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change an owner")
@pytest.mark.parametrize("is_linked", [False, True])
def test_a_record_of_another_user_shows_no_file_outside_of_the_data_set(
    desk: Desk, world: World, tmp_path: Path, is_linked: bool
) -> None:
    secret = tmp_path / "secret.log"
    secret.write_text("a secret line\n")
    (world.data_dir / "jobs").mkdir()
    log = link(world, "jobs/logs/1_0.log", secret)
    record = desk.record("1_0", ended(74), log=str(log if is_linked else secret))
    os.chown(record, 12345, -1)
    data = world.data_dir
    for words in (["logs", data, 0], ["status", data], ["status", data, "--json"]):
        assert "a secret line" not in world.main(*words).text
    os.chown(record, os.geteuid(), -1)
    # A record of the user may name any log, but others may have put a link into the folder of logs.
    assert ("a secret line" in world.main("logs", data, 0).text) == (not is_linked)


@pytest.mark.processes
def test_no_line_is_appended_to_a_file_that_has_another_name_elsewhere(
    desk: Desk, world: World, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("a line\n")
    (world.data_dir / "jobs").mkdir()
    os.link(kept, world.data_dir / "jobs" / "history.jsonl")
    world.main("submit", world.data_dir).ends(0)
    assert desk.sent()
    assert kept.read_text() == "a line\n"
