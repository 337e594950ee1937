"""tests/data/golden pins the bytes on disk: a change of them is a change of the format's version.

Run by hand, ``python tests/preprocess/test_golden.py`` makes that folder anew; its README says when that
is right.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from loader import get_llama3_dataloader
from shardprep.format.plan import Plan, need_plan

if TYPE_CHECKING:
    from tests.conftest import Prep

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
DATA_SETS: dict[str, dict[str, Any]] = {
    "documents_json": {},
    "documents_npy": {"token_format": "npy", "keep_text": False, "append_eos": True},
    "packed": {"record": "packed", "seq_len": 16},
    "packed_best_fit": {"record": "packed", "seq_len": 16, "pack": "best_fit"},
    "jsonl_zst": {"id_field": "id", "append_eos": True},
    "parquet": {"record": "packed", "seq_len": 16, "text_template": "{title}\\n{text}"},
}
# Their input is kept as it was written once: another version of zstd or pyarrow gives other bytes.
OTHER_RAW = {"jsonl_zst": "raw_jsonl_zst", "parquet": "raw_parquet"}
NUM_SHARDS = 2
RAW = {
    "en.txt": b"The kettle sings; nobody's listening.\n"
    b"\n"
    b"  12345 steps, 6:05 in the morning  \r\n"
    b"\t \r\n"
    b"<|end_of_text|> is a name, not an end.\n"
    b"bad byte: \xff\n"
    b"old Mac\rline ends\r"
    b"no line end",
    "ko.txt": b"\xef\xbb\xbf"
    + "표가 앞에 있는 첫 줄\r\n바닷가 마을의 겨울은 길다.\n\n도서관 2층 창가 자리 🙂\n".encode()
    + b"\xea\xb0\n"
    + "줄을 끝내지 않는\u2028분리자와 \u3000전각 공백\u3000\n끝.\n".encode(),
}


def raw_of(name: str) -> Path:
    """The input of a golden data set."""
    return GOLDEN / OTHER_RAW.get(name, "raw")


def pinned(name: str) -> dict[str, bytes]:
    """All files of a golden data set that are equal whenever it is made."""
    folder = GOLDEN / name
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def plan_facts(folder: Path) -> Plan:
    """A plan without what may differ between equal plans, such as files that transformers writes."""
    plan = need_plan(folder)
    return dataclasses.replace(
        plan,
        input_dir=Path(),
        tokenizer=dataclasses.replace(plan.tokenizer, model_id=""),
        tokenizer_files={},
        fast_engine_is_equal=False,  # not looked at for so little text
        inputs=[msgspec.structs.replace(item, mtime_ns=0) for item in plan.inputs],
        cuts=list(plan.cuts),
        names_left_out=list(plan.names_left_out),
    )


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_task_writes_the_pinned_bytes(prep: Prep, tmp_path: Path, name: str) -> None:
    shutil.copytree(GOLDEN / "tokenizer", tmp_path / "tokenizer")
    shutil.copy(GOLDEN / name / "plan.json", tmp_path)
    for shard_id in range(NUM_SHARDS):
        ended = prep.command("--shard_id", shard_id, "--output_dir", tmp_path, "--input_dir", raw_of(name))
        assert ended.code == 0, ended.text
    assert prep.contents(tmp_path) == prep.contents(GOLDEN / name)
    assert prep.command("verify", tmp_path).code == 0
    assert (tmp_path / "index.json").read_bytes() == (GOLDEN / name / "index.json").read_bytes()


@pytest.mark.parametrize("name", DATA_SETS)
def test_planning_gives_the_pinned_plan(prep: Prep, tmp_path: Path, name: str) -> None:
    options = {**DATA_SETS[name], "model_id": str(GOLDEN / "tokenizer"), "max_bad_fraction": 0.5}
    prep.plan(raw_of(name), tmp_path / "data", num_shards=NUM_SHARDS, **options)
    assert plan_facts(tmp_path / "data") == plan_facts(GOLDEN / name)


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_data_set_of_before_is_verified_and_loaded(prep: Prep, tmp_path: Path, name: str) -> None:
    """As it lies there, written by commit 522a712 or one before it."""
    data = tmp_path / "data"
    shutil.copytree(GOLDEN / name, data)
    shutil.copytree(GOLDEN / "tokenizer", data / "tokenizer")
    assert prep.command("verify", data).code == 0
    deep = prep.command("verify", data, "--deep", "--input_dir", raw_of(name))
    assert (deep.code, "byte for byte" in deep.text) == (0, True), deep.text
    num_tokens = sum(
        json.loads(path.read_bytes())["counts"]["num_tokens"] for path in data.glob("shard-*.json")
    )
    with get_llama3_dataloader(data, batch_size=1, num_workers=0, pin_memory=False) as loader:
        assert sum(int(batch["attention_mask"].sum()) for batch in loader) == num_tokens


def test_nothing_is_missing_from_the_pinned_files() -> None:
    shards = [f"shard-{number:05d}" for number in range(NUM_SHARDS)]
    names = {f"{shard}.{suffix}" for shard in shards for suffix in ("tar", "idx", "json")}
    quarantines = {f"quarantine/{shard}.jsonl" for shard in shards}
    for name in DATA_SETS:
        ids = {f"ids/{shard}.jsonl" for shard in shards if "id_field" in DATA_SETS[name]}
        found = {path for path in pinned(name) if not path.startswith("quarantine/") or name not in OTHER_RAW}
        expected = quarantines if name not in OTHER_RAW else set()
        assert found == {"plan.json", "index.json", *names, *ids, *expected}
        assert any(path.startswith("quarantine/") for path in pinned(name))
    assert {path.name: path.read_bytes() for path in (GOLDEN / "raw").iterdir()} == RAW


def make_golden() -> None:
    """Write the folder anew; paths and times of this machine are left out of it."""
    from preprocess.__main__ import main
    from preprocess.look.train_tokenizer import train_tokenizer
    from shardprep.format.manifest import read_manifest
    from shardprep.format.names import manifest_path
    from shardprep.format.plan import plan_json
    from shardprep.format.tokenizer_files import stamp_tokenizer

    def run(*args: object) -> None:
        code = main([str(item) for item in args])
        if code:
            raise SystemExit(code)

    for path in GOLDEN.iterdir():
        if path.is_dir() and path.name not in OTHER_RAW.values():
            shutil.rmtree(path)
    (GOLDEN / "raw").mkdir()
    for name, data in RAW.items():
        (GOLDEN / "raw" / name).write_bytes(data)
    os.chdir(GOLDEN)
    train_tokenizer(input_dir=Path("raw"), vocab_size=270, output_dir=Path("tokenizer"))
    for name, options in DATA_SETS.items():
        flags = [
            f"--no-{key}" if value is False else f"--{key}" if value is True else f"--{key}={value}"
            for key, value in options.items()
        ]
        raw = OTHER_RAW.get(name, "raw")
        run("plan", f"--input_dir={raw}", f"--output_dir={name}", "--model_id=tokenizer",
            f"--num_shards={NUM_SHARDS}", "--max_bad_fraction=0.5", *flags)  # fmt: skip
        run("run", name, "--num_proc=1")
        run("verify", name)
        plan = dataclasses.replace(
            need_plan(Path(name)),
            input_dir=Path("/raw"),
            inputs=[msgspec.structs.replace(item, mtime_ns=0) for item in need_plan(Path(name)).inputs],
            tokenizer_files=stamp_tokenizer(Path("tokenizer")),
        )
        Path(name, "plan.json").write_bytes(plan_json(plan))
        for shard_id in range(NUM_SHARDS):
            manifest = dataclasses.replace(read_manifest(Path(name), shard_id), run={})
            manifest_path(Path(name), shard_id).write_bytes(manifest.to_json())
        shutil.rmtree(f"{name}/tokenizer")


if __name__ == "__main__":
    make_golden()
