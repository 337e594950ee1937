"""Documents of which the tokenizer leaves nothing: made, shown and reported as any others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers

import slurm.__main__

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Ended, Prep

SOME, NONE = ["안녕", "words", "한", "more words", "글"], ["안녕", "한"]


def made(prep: Prep, raw: Path, tmp_path: Path, texts: list[str], *flags: str) -> Path:
    """A data set made with a tokenizer that drops all but ASCII, and puts nothing around it."""
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = Tokenizer.from_file(str(prep.model_dir / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Replace(Regex(r"[^\x20-\x7e]+"), "")
    tokenizer.save(str(model / "tokenizer.json"))
    config = (prep.model_dir / "tokenizer_config.json").read_bytes()
    (model / "tokenizer_config.json").write_bytes(config)
    (raw / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = tmp_path / "data"
    planned = prep.command(
        *("plan", "--input_dir", raw, "--output_dir", data, "--model_id", model, "--no-add_special_tokens"),
        *flags,
    )
    assert planned.code == 0, planned.text
    prep.make(data)
    return data


def report(data: Path, *flags: str) -> int:
    code: int = slurm.__main__.main(["report", str(data), *flags])
    return code


def addresses(ended: Ended) -> list[tuple[str, int]]:
    """(number, tokens) of each sample that was printed."""
    lines = [line.split() for line in ended.text.splitlines() if line.startswith("shard-")]
    return [(words[2].rstrip(":"), int(words[3])) for words in lines]


@pytest.mark.parametrize("texts", [SOME, NONE], ids=["some", "all"])
def test_peek_prints_documents_without_tokens_as_empty(
    prep: Prep, raw: Path, tmp_path: Path, texts: list[str]
) -> None:
    data = made(prep, raw, tmp_path, texts)
    ended = prep.command("peek", data)
    assert ended.code == 0, ended.text
    assert [number for number, _ in addresses(ended)] == [str(n) for n in range(len(texts))]
    assert [tokens > 0 for _, tokens in addresses(ended)] == [text.isascii() for text in texts]
    for address in ("0:0", "a.jsonl:0"):
        assert [number for number, _ in addresses(prep.command("peek", data, address))] == ["0"]


@pytest.mark.parametrize("flags", [[], ["--record", "packed", "--seq_len", "8", "--no-append_eos"]])
@pytest.mark.parametrize("texts", [SOME, NONE, []], ids=["some", "all", "no documents"])
def test_the_report_of_documents_without_tokens_is_written(
    prep: Prep, raw: Path, tmp_path: Path, texts: list[str], flags: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data = made(prep, raw, tmp_path, texts, *flags)
    capsys.readouterr()
    assert report(data, "--json") == 0
    assert json.loads(capsys.readouterr().out)["counts"]["num_documents"] == len(texts)
    assert report(data, "--output", str(tmp_path / "page.html")) == 0
