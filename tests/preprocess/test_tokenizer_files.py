"""What a plan remembers of a tokenizer's folder."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from preprocess.make import engines
from preprocess.plan import tokenizer as resolved_tokenizer
from preprocess.plan.tokenizer import describe_tokenizer, publish_tokenizer, resolve_tokenizer
from shardprep.errors import ReadWriteError
from tests.word_tokenizers import save_word_tokenizer

if TYPE_CHECKING:
    from tests.conftest import Prep


def test_a_token_that_the_configuration_does_not_name_is_not_the_word_none(tmp_path: Path) -> None:
    """Llama 3 has no pad token, and its vocabulary has the word None."""
    words = Tokenizer(models.WordLevel({"None": 0, "null": 1, "</s>": 2}, "None"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(tmp_path)
    spec = describe_tokenizer(tmp_path, "model")
    assert (spec.bos_token_id, spec.eos_token_id, spec.pad_token_id) == (None, 2, None)


def test_a_special_token_that_transformers_did_not_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a look at tokenizer_config.json fails, transformers goes on without it and says nothing."""
    model = tmp_path / "model"
    save_word_tokenizer(model, 9)
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"w0": 0}, "w0")))
    edit = json.loads((model / "tokenizer_config.json").read_bytes())
    (model / "tokenizer_config.json").write_text(json.dumps({**edit, "add_bos_token": False}))
    monkeypatch.setattr(
        resolved_tokenizer, "_save_in_own_process", lambda _, folder: bare.save_pretrained(folder)
    )
    (tmp_path / "resolved").mkdir()
    with pytest.raises(ReadWriteError, match=r"found no eos_token, pad_token of .*tokenizer_config\.json"):
        resolve_tokenizer(str(model), tmp_path / "resolved", allow_special_tokens=False)


def test_a_failed_read_is_no_verdict_on_the_fast_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_word_tokenizer(tmp_path, 9)

    def failing(path: Path, **_: Any) -> bytes:
        raise ReadWriteError(f"{path} cannot be read: Stale file handle")

    monkeypatch.setattr(engines, "read_regular", failing)
    with pytest.raises(ReadWriteError, match="Stale file handle"):
        engines.equal_fast_engine(
            tmp_path / "tokenizer.json", allow_special_tokens=False, texts=["w1"], expected_sha256=""
        )


def test_a_folder_of_resolved_files_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = tmp_path / "resolved"
    save_word_tokenizer(resolved, 9)
    listed = os.listdir

    def failing(path: Any) -> list[str]:
        if Path(path) == resolved:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", failing)
    with pytest.raises(ReadWriteError, match="resolved cannot be read: Input/output error"):
        publish_tokenizer(resolved, tmp_path, None)


@pytest.mark.parametrize(("pad", "warns"), [("</s>", True), ("<pad>", False), (None, False)])
def test_planning_warns_where_the_pad_token_is_eos(
    prep: Prep, tmp_path: Path, pad: str | None, warns: bool
) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<pad>": 2}, "a"))
    model, raw = tmp_path / "model", tmp_path / "raw"
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token=pad).save_pretrained(model)
    raw.mkdir()
    (raw / "a.txt").write_text("a\n")
    flags = ("--input_dir", raw, "--output_dir", tmp_path / "data", "--model_id", model)
    ended = prep.command("plan", *flags)
    assert ended.code == 0, ended.text
    assert ended.text.count("warning: PAD is EOS (1) in this tokenizer: ") == int(warns)
