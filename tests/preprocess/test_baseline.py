"""The user's plain form gives the baseline's members, byte by byte and in its order."""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.waiting import HANG_S

if TYPE_CHECKING:
    from tests.conftest import Prep

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "baseline.py"
CONTROL = ["<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>"]


def run_baseline(raw: Path, out: Path, model: Path, shard_id: int) -> None:
    """The script as it stands, in this process."""
    argv = ["--shard_id", shard_id, "--input_dir", raw, "--output_dir", out, "--model_id", model]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), *map(str, argv)])
        runpy.run_path(str(SCRIPT), run_name="__main__")


def differing_keys(first: list[tuple[str, bytes]], ours: list[tuple[str, bytes]]) -> set[str]:
    """Keys whose bytes differ, after checking that names and order do not."""
    assert [name for name, _ in first] == [name for name, _ in ours]
    assert len(first) > 0
    return {name.split(".")[0] for (name, old), (_, new) in zip(first, ours, strict=True) if old != new}


@pytest.fixture(scope="module")
def raw_dir(sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of sample text: empty lines, every line end, blanks, a mark, control tokens' names."""
    folder = tmp_path_factory.mktemp("raw")
    lines = (sample_dir / "ko_0.txt").read_text(encoding="utf-8").splitlines()
    lines[3:3] = ["", "  \t ", "\u3000둘러싸인 \x0b", "a\u2028b\x85c", "\ufeff표", "끝 \\ \" ' {}"]
    ends = itertools.cycle(["\n", "\r\n", "\n", "\r"])
    text = "\ufeff" + "".join(line + next(ends) for line in lines) + "no line end"
    (folder / "b.txt").write_bytes(text.encode())
    control = "".join(f"text {token} more{token}\n plain {number}\n" for number, token in enumerate(CONTROL))
    (folder / "a.txt").write_text((sample_dir / "en_1.txt").read_text() + control)
    (folder / "ignored.md").write_text("not a .txt file")
    return folder


@pytest.fixture(scope="module")
def first_dir(prep: Prep, raw_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the baseline makes of both files."""
    folder = tmp_path_factory.mktemp("first")
    for shard_id in (0, 1):
        run_baseline(raw_dir, folder, prep.model_dir, shard_id)
    return folder


def make_plainly(prep: Prep, raw: Path, out: Path, *more: str, flag: str = "--shard_id") -> None:
    for shard_id in (0, 1):
        ended = prep.command(
            flag, shard_id, "--input_dir", raw, "--output_dir", out, "--model_id", prep.model_dir, *more
        )
        assert ended.code == 0, ended.text


@pytest.mark.slow
def test_the_plain_form_gives_the_baselines_members_but_for_control_tokens(
    prep: Prep, raw_dir: Path, first_dir: Path, tmp_path: Path
) -> None:
    make_plainly(prep, raw_dir, tmp_path / "data")
    for shard_id in (0, 1):
        name = f"shard-{shard_id:05d}.tar"
        first, ours = prep.members(first_dir / name), prep.members(tmp_path / "data" / name)
        texts = dict(first)
        with_control = {
            key.split(".")[0]
            for key, text in texts.items()
            if key.endswith(".text.txt") and any(token in text.decode() for token in CONTROL)
        }
        assert len(with_control) == (len(CONTROL) if shard_id == 0 else 0)
        assert differing_keys(first, ours) == with_control


@pytest.mark.slow
def test_no_document_differs_where_control_tokens_are_allowed(
    prep: Prep, raw_dir: Path, first_dir: Path, tmp_path: Path
) -> None:
    make_plainly(prep, raw_dir, tmp_path / "data", "--allow-special-tokens", flag="--shard-id")
    for name in ("shard-00000.tar", "shard-00001.tar"):
        assert not differing_keys(prep.members(first_dir / name), prep.members(tmp_path / "data" / name))


def test_control_tokens_in_a_text_stay_text(prep: Prep, raw_dir: Path, tmp_path: Path) -> None:
    prep.plan(raw_dir, tmp_path / "data")
    plan = prep.make(tmp_path / "data", 0)
    for name, payload in prep.members(tmp_path / "data" / "shard-00000.tar"):
        if name.endswith("token_ids.json"):
            ids = json.loads(payload)
            assert ids[0] == plan.tokenizer.bos_token_id
            assert max(ids[1:]) < 600, "the special tokens follow the 600 others"


@pytest.mark.processes
def test_llama_3_on_hundreds_of_korean_and_english_lines(
    prep: Prep, shared_dir: Path, corpora_dir: Path, tmp_path: Path
) -> None:
    """test_llama3.py compares the ids of many more."""
    raw, model = tmp_path / "raw", shared_dir / "tokenizers" / "llama3"
    raw.mkdir()
    num_lines = {"en_paragraphs.txt": 200, "ko_reviews.txt": 500}
    with (raw / "a.txt").open("wb") as text:
        for name, number in num_lines.items():
            with (corpora_dir / name).open("rb") as file:
                text.writelines(itertools.islice(file, number))
    task = prep.start(
        "--shard_id", 0, "--input_dir", raw, "--output_dir", tmp_path / "ours", "--model_id", model
    )
    run_baseline(raw, tmp_path / "first", model, 0)
    said, _ = task.communicate(timeout=HANG_S)
    assert task.returncode == 0, said
    assert "engine: gigatoken" in said, "so little text that another engine encoded it"
    first, ours = (prep.members(tmp_path / name / "shard-00000.tar") for name in ("first", "ours"))
    assert len(first) == 2 * sum(num_lines.values())
    assert not differing_keys(first, ours), "no document of the corpora names a control token"
