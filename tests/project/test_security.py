"""What SECURITY.md promises, where no other test shows it; and that each test it names is there."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zstandard

from loader import get_llama3_dataloader
from loader.find_shards import copy_url
from preprocess.read.compression import COMPRESSIONS
from shardprep.errors import BadInput, NotFound, ShardprepError
from tests.checkout import ROOT
from tests.faults import altered_inputs

if TYPE_CHECKING:
    from tests.conftest import Prep

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


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def pickled(marker: Path) -> bytes:
    data = pickle.dumps(RunsCode(marker))
    pickle.loads(data)
    assert marker.exists(), "it would have run"
    marker.unlink()
    return data


@pytest.fixture
def made_dir(prep: Prep, data_dir: Path) -> Path:
    prep.make(data_dir)
    return data_dir


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def npy_of_objects(pickled: bytes) -> bytes:
    """What numpy.save writes for an array of objects, whose content is the pickle."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return file.getvalue() + pickled


def test_no_pickle_in_a_member_of_a_tar_is_ever_opened(
    prep: Prep, tmp_path: Path, marker: Path, pickled: bytes
) -> None:
    """webdataset's own decoder opens ``.pyd``, ``.pickle`` and arrays of objects."""
    members = [("a.token_ids.npy", npy_of_objects(pickled)), ("a.extra.pyd", pickled), ("b.pickle", pickled)]
    for chosen in (members[:1], members[1:2], members[2:], members):
        tar = write_tar(tmp_path / "strange.tar", chosen)
        with pytest.raises(ShardprepError):
            list(get_llama3_dataloader([tar], 1, prep.model_dir, num_workers=0))
        assert not marker.exists()


@pytest.mark.parametrize("name", ["index.json", "shard-00000.idx", "shard-00000.json", "plan.json"])
def test_no_pickle_in_place_of_a_file_of_the_data_set_is_ever_opened(
    prep: Prep, made_dir: Path, marker: Path, pickled: bytes, name: str
) -> None:
    (made_dir / name).write_bytes(pickled)
    if name == "plan.json":
        assert prep.command("verify", made_dir).code == 65
    else:
        with pytest.raises(ShardprepError):
            list(get_llama3_dataloader(made_dir, 1, num_workers=0))
    assert not marker.exists()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["../outside", "/tmp/shardprep_outside", "a/../../outside", "./../outside"])
def test_a_member_that_names_a_place_elsewhere_is_never_written_there(
    prep: Prep, tmp_path: Path, name: str
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    write_tar(inner / "a.tar", [(f"{name}.token_ids.json", b"[1, 2]")])
    url = f"pipe:cat {inner}/a.tar"
    for shards, options in (([inner / "a.tar"], {}), ([url], {"cache_dir": inner / "cache"})):
        with get_llama3_dataloader(shards, 1, prep.model_dir, num_workers=0, **options) as loader:  # type: ignore[arg-type]
            assert next(iter(loader))["input_ids"].tolist() == [[1, 2]]
    assert not Path("/tmp/shardprep_outside.token_ids.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner"]
    assert len(list(inner.rglob("*.tar"))) == 2


@pytest.mark.processes
def test_secrets_of_the_environment_stand_in_no_file_and_no_message(
    prep: Prep, sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    data = tmp_path / "data"
    flags = ["--input_dir", sample_dir, "--output_dir", data, "--model_id", prep.model_dir, "--num_shards", 1]
    said = "".join(
        prep.command(*command).text for command in (["plan", *flags], ["run", data], ["verify", data])
    )
    assert (data / "index.json").exists(), said
    written = [path.read_bytes() for path in data.rglob("*") if path.is_file()]
    assert len(written) >= 6
    for secret in SECRETS.values():
        assert secret not in said
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
    with pytest.raises(NotFound, match=re.escape(shown)) as caught:
        copy_url(url, tmp_path)
    error: BaseException | None = caught.value
    while error is not None:
        assert "secret" not in str(error)
        error = error.__cause__
    assert not any("secret" in path.name for path in tmp_path.rglob("*"))


def test_every_test_that_the_page_on_security_names_is_there() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    names = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(names) >= 20
    for file, name in names:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("ending", COMPRESSIONS)
def test_what_is_small_only_compressed_is_decompressed_in_pieces_of_a_bounded_size(
    ending: str,
) -> None:
    most, num_bytes = 1 << 18, 64 << 20
    compress: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstandard.compress
    }  # fmt: skip
    data = compress[ending](bytes(num_bytes))
    stream, sizes = COMPRESSIONS[ending].open(), []
    while not stream.eof:
        sizes.append(len(stream.decompress(data if stream.needs_input else b"", most)))
        data = b""
    assert sum(sizes) == num_bytes
    assert max(sizes) <= most


def test_an_xz_file_that_declares_a_dictionary_of_4_gib_is_refused(prep: Prep, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    path = tmp_path / "raw" / "a.txt.xz"
    altered_inputs.DECLARED["dictionary.txt.xz"][1](path)
    with pytest.raises(BadInput, match=f"{path.name} cannot be decompressed as xz"):
        prep.plan(tmp_path / "raw", tmp_path / "data")
