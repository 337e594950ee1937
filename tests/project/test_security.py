"""What SECURITY.md promises, where no other test shows it; and that each test it names is there."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import re
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from loader import NotFound, ShardprepError, get_llama3_dataloader
from tests.checkout import ROOT
from tests.world import World, open_loader, tokenizer_dir

SECRETS = {
    "HF_TOKEN": "hf_secretOfTheHub0123456789",
    "AWS_SECRET_ACCESS_KEY": "secretOfTheCloud/0123456789",
    "WANDB_API_KEY": "secretOfTheRuns0123456789",
}


class RunsCode:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def write_tar(path: Path, name: str, data: bytes) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return path


PICKLED = ("index.json", "plan.json", *(f"shard-00000.{suffix}" for suffix in ("idx", "json")))
MEMBERS = ("a.token_ids.npy", "a.pyd", "a.pickle")  # of a tar


@pytest.mark.parametrize("name", [*PICKLED, *MEMBERS])
def test_no_pickle_is_ever_opened(tmp_path: Path, name: str) -> None:
    """In place of a file, or in a member of a tar: webdataset's own decoder opens these."""
    pickled = pickle.dumps(RunsCode(marker := tmp_path / "marker"))
    pickle.loads(pickled)
    assert marker.exists(), "it would have run"
    marker.unlink()
    world = World(tmp_path).raw({"a.txt": "a line\n" * 9}).make(num_shards=1)
    shards: list[Any] = [world.data_dir]
    if name in MEMBERS:
        header = io.BytesIO()  # of an array of objects, as numpy.save begins it; its content is the pickle
        np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (1,)})
        data = header.getvalue() + pickled if name.endswith(".npy") else pickled
        shards = [write_tar(tmp_path / "a.tar", name, data)]
    else:
        (world.data_dir / name).write_bytes(pickled)
    if name == "shard-00000.json":
        (world.data_dir / "index.json").unlink()  # which stands for the manifests
    if name == "plan.json":
        assert world.main("verify", world.data_dir).code == 65
    else:
        with pytest.raises(ShardprepError), open_loader(shards, 1, model_id=tokenizer_dir()) as loader:
            list(loader)
    assert not marker.exists()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["../outside", "/tmp/shardprep_outside", "a/../../outside", "./../outside"])
def test_a_member_that_names_a_place_elsewhere_is_never_written_there(tmp_path: Path, name: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    write_tar(inner / "a.tar", f"{name}.token_ids.json", b"[1, 2]")
    url = f"pipe:cat {inner}/a.tar"
    for shards, options in (([inner / "a.tar"], {}), ([url], {"cache_dir": inner / "cache"})):
        with get_llama3_dataloader(shards, 1, tokenizer_dir(), num_workers=0, **options) as loader:  # type: ignore[arg-type]
            assert next(iter(loader))["input_ids"].tolist() == [[1, 2]]
    assert not Path("/tmp/shardprep_outside.token_ids.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner"]
    assert len(list(inner.rglob("*.tar"))) == 2


@pytest.mark.processes
def test_secrets_of_the_environment_stand_in_no_file_and_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    world = World(tmp_path).raw({"a.txt": "a line\n" * 9})
    said = [world.try_plan(num_shards=1)]
    said += [world.main(command, world.data_dir) for command in ("run", "verify")]
    assert [ended.code for ended in said] == [0, 0, 0]
    written = [path.read_bytes() for path in world.data_dir.rglob("*") if path.is_file()]
    assert len(written) >= 6
    for secret in SECRETS.values():
        assert not any(secret in ended.text for ended in said)
        assert not any(secret.encode() in content for content in written)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:secret@127.0.0.1:9/a.tar", "http://127.0.0.1:9/a.tar"),
        ("http://127.0.0.1:9/a.tar?X-Amz-Signature=secret#secret", "http://127.0.0.1:9/a.tar?..."),
        ("pipe:false -H 'Authorization: Bearer secret' /a.tar", "pipe:false ..."),
    ],
)
def test_secrets_of_a_url_stand_in_no_error(tmp_path: Path, url: str, shown: str) -> None:
    with pytest.raises(NotFound) as caught:
        get_llama3_dataloader([url], 1, tokenizer_dir(), num_workers=0, cache_dir=tmp_path)
    assert shown in str(caught.value)
    error: BaseException | None = caught.value
    while error is not None:
        assert "secret" not in str(error)
        error = error.__cause__
    assert not any("secret" in path.name for path in tmp_path.rglob("*"))


def test_each_test_that_the_page_names_is_there() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    names = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(names) >= 20
    for file, name in names:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), name


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, 1),
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".bz2": lambda data: bz2.compress(data, 1),
    ".zst": zstandard.compress,
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", COMPRESS)
def test_what_is_small_only_compressed_takes_no_more_memory_than_another_file(
    tmp_path: Path, ending: str
) -> None:
    """12 MB of long lines; what Python itself allocates is counted."""
    peaks = []
    for num_lines in (20, 200):
        line = b"a line that is the same again and again, so that it packs; " * 1000 + b"\n"
        world = World(tmp_path / str(num_lines)).raw({f"a.txt{ending}": COMPRESS[ending](line * num_lines)})
        tracemalloc.start()
        world.plan(num_shards=1, limit=2)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + (6 << 20)


def xz_of_a_large_dictionary() -> bytes:
    """It declares 4 GiB."""
    data = bytearray(lzma.compress(b"a line\n" * 10, preset=0))
    begin = 12  # of a block's header
    end = begin + 4 * (data[begin] + 1) - 4
    data[begin + 4] = 40
    data[end : end + 4] = struct.pack("<I", zlib.crc32(data[begin:end]))
    return bytes(data)


DECLARED: dict[str, bytes] = {
    # A window of 2 TiB, and 2**60 bytes of content.
    "window.txt.zst": struct.pack("<IBBQ", 0xFD2FB528, 0b1100_0000, 31 << 3, 1 << 60) + b"\x01\x00\x00",
    "dictionary.txt.xz": xz_of_a_large_dictionary(),
    "name.txt.gz": b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (8 << 20),  # a name that never ends
    "footer.parquet": b"PAR1" + bytes(1000) + struct.pack("<I", (1 << 31) - 1) + b"PAR1",
    "schema.arrow": struct.pack("<II", 0xFFFFFFFF, (1 << 31) - 8) + bytes(1000),
}


@pytest.mark.parametrize("name", DECLARED)
def test_an_input_that_declares_gigabytes_is_refused(tmp_path: Path, name: str) -> None:
    world = World(tmp_path).raw({name: DECLARED[name]})
    assert (world.try_plan().code or world.try_shard(0).code) == 65
