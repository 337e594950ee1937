"""The loader's tokenizer is the one that transformers would load from the same folder, loaded sooner."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from loader import tokenizer as tokenizer_choice
from loader.shards.shard_set import ShardSet
from loader.tokenizer import choose_tokenizer

if TYPE_CHECKING:
    from tests.conftest import Prep


@pytest.fixture
def model_dir(prep: Prep) -> Path:
    return prep.model_dir


def chosen(folder: Path) -> Any:
    return choose_tokenizer(ShardSet([]), folder)


def assert_alike(found: Any, expected: Any) -> None:
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert found.init_kwargs == expected.init_kwargs
    assert repr(found) == repr(expected)
    text = "하늘과 바다 <|end_of_text|> of the moon"
    assert found(text) == expected(text)
    assert found.special_tokens_map == expected.special_tokens_map


def as_before_5(folder: Path) -> None:
    """Transformers 4 wrote the added tokens into the configuration, and a file of the special ones."""
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    config["added_tokens_decoder"] = {str(token.pop("id")): token for token in tokens}
    config_path.write_text(json.dumps(config))


def with_special_tokens_map(folder: Path) -> None:
    special = {"eos_token": "<|begin_of_text|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))


def with_added_tokens_last(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"] = data.pop("added_tokens")
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))


def without_line_ends(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(data, separators=(",", ":")))


@pytest.mark.parametrize(
    "change",
    [None, as_before_5, with_special_tokens_map, with_added_tokens_last, without_line_ends],
)
def test_it_is_the_one_that_transformers_loads(
    model_dir: Path, tmp_path: Path, change: Callable[[Path], None] | None
) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "model")
    if change is not None:
        change(folder)
    assert_alike(chosen(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True))


def test_llama_3s_is_the_one_that_transformers_loads(shared_dir: Path) -> None:
    folder = shared_dir / "tokenizers" / "llama3"
    assert_alike(chosen(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True))


def test_tokenizer_json_is_parsed_once_and_by_its_own_library(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    load = json.load

    def noted(file: io.TextIOWrapper, **options: Any) -> Any:
        parsed.append(Path(file.name).name)
        return load(file, **options)

    monkeypatch.setattr(json, "load", noted)
    chosen(model_dir)
    assert "tokenizer_config.json" in parsed
    assert "tokenizer.json" not in parsed


def test_added_tokens_that_go_on_for_long_are_left_to_transformers(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_choice, "_ADDED_TOKENS_CHARS", 200)
    assert_alike(chosen(model_dir), AutoTokenizer.from_pretrained(model_dir, local_files_only=True))
