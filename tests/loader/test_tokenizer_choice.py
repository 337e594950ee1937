"""The loader's tokenizer is the data set's own, known by its files, and loaded when it is asked for."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from loader import get_llama3_dataloader
from loader.batches import choose_pad_token
from loader.find_shards import find_shards
from loader.tokenizer import LoaderTokenizer, choose_tokenizer
from shardprep.errors import OtherTokenizer, ReadWriteError
from tests.children import run_child

if TYPE_CHECKING:
    from tests.conftest import Prep


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


def without_line_ends(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(data, separators=(",", ":")))


@pytest.fixture(scope="module")
def made_dir(prep: Prep, planned_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample text as shards. Copy it; never write to it."""
    folder = shutil.copytree(planned_dir, tmp_path_factory.mktemp("made") / "data")
    prep.make(folder)
    return folder


@pytest.fixture
def data_dir(made_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made_dir, tmp_path / "data")


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def with_two_ids_exchanged(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    first, second, *_ = vocab
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(data))


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


CHANGES = {
    "another EOS": replaced("tokenizer_config.json", '"<|end_of_text|>"', '"<|begin_of_text|>"'),
    "a key of another name": replaced("tokenizer_config.json", '"eos_token"', '"eor_token"'),
    "another piece": with_two_ids_exchanged,
    "no configuration": removed("tokenizer_config.json"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_data_sets_own_tokenizer_that_is_not_the_manifests_is_refused(
    data_dir: Path, change: Callable[[Path], None]
) -> None:
    """Where a file is altered, or a look at it fails, transformers takes what it finds without a word."""
    change(data_dir / "tokenizer")
    with pytest.raises(OtherTokenizer, match=f"{data_dir / 'tokenizer'}"):
        choose_tokenizer(find_shards(data_dir), None)


def test_a_file_of_the_tokenizer_that_cannot_be_opened_is_named(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real_open = data_dir / "tokenizer" / "tokenizer_config.json", os.open

    def failing(name: Any, *args: Any, **options: Any) -> int:
        if Path(name) == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return real_open(name, *args, **options)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(ReadWriteError, match=str(path)):
        choose_tokenizer(find_shards(data_dir), None)


def test_a_model_of_another_eos_pads_and_ends_documents_as_the_manifests_say(
    data_dir: Path, prep: Prep, tmp_path: Path
) -> None:
    shards = find_shards(data_dir)
    shutil.rmtree(data_dir / "tokenizer")
    folder = shutil.copytree(prep.model_dir, tmp_path / "model")
    CHANGES["another EOS"](folder)
    found = choose_tokenizer(shards, folder)
    expected = shards.datasets[0].spec.tokenizer.eos_token_id
    assert found.eos_token_id == found.load().eos_token_id == expected


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What transformers is asked to load, by name."""
    asked: list[str] = []
    real = AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda name, **options: asked.append(name) or real(name, **options)
    )
    return asked


def test_transformers_loads_a_data_sets_tokenizer_when_it_is_asked_for_and_once(
    data_dir: Path, loads: list[str]
) -> None:
    with get_llama3_dataloader(data_dir, 2, num_workers=0, rank=0, world_size=1) as loader:
        batch = next(iter(loader))
        assert loads == []
        tokenizer = loader.tokenizer
        assert loader.tokenizer is tokenizer
    assert loads == [str(data_dir / "tokenizer")]
    again = AutoTokenizer.from_pretrained(data_dir / "tokenizer", local_files_only=True)
    again.pad_token = tokenizer.pad_token
    assert_alike(tokenizer, again)
    assert (batch["input_ids"][batch["attention_mask"] == 0] == tokenizer.pad_token_id).all()


@pytest.mark.processes
def test_a_loader_and_its_first_batch_import_no_transformers(data_dir: Path) -> None:
    code = (
        "import sys; from loader import get_llama3_dataloader as load\n"
        "batch = next(iter(load(sys.argv[1], 2, num_workers=0, rank=0, world_size=1)))\n"
        "print(batch.input_ids.shape[0], 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = run_child([sys.executable, "-P", "-c", code, data_dir])
    assert done.stdout.split() == ["2", "True", "False"]


def with_an_added_token(folder: Path) -> None:
    (folder / "added_tokens.json").write_text('{"<|new|>": 700}')


def with_a_map_of_the_same_names(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": config["eos_token"]}))


@pytest.mark.parametrize(
    ("change", "num_loads"),
    [(with_a_map_of_the_same_names, 0), (as_before_5, 0), (without_line_ends, 0), (with_an_added_token, 1)],
)
def test_where_another_file_may_add_tokens_transformers_is_asked_at_once(
    data_dir: Path, loads: list[str], change: Callable[[Path], None], num_loads: int
) -> None:
    change(data_dir / "tokenizer")
    with contextlib.suppress(OtherTokenizer):
        choose_tokenizer(find_shards(data_dir), None)
    assert len(loads) == num_loads


def test_what_the_files_tell_of_a_tokenizer_is_what_transformers_finds(data_dir: Path) -> None:
    found = choose_tokenizer(find_shards(data_dir), None)
    loaded = LoaderTokenizer.of_loaded(found.load(), found.fingerprint)
    names = ("eos_token", "eos_token_id", "pad_token", "pad_token_id", "added_vocab", "vocab_size")
    assert {name: getattr(found, name) for name in names} == {name: getattr(loaded, name) for name in names}
    assert choose_pad_token(found) == choose_pad_token(found.load())


def test_a_model_id_with_the_very_files_of_the_data_set_is_not_loaded(
    data_dir: Path, tmp_path: Path, loads: list[str]
) -> None:
    given = shutil.copytree(data_dir / "tokenizer", tmp_path / "given")
    choose_tokenizer(find_shards(data_dir), given)
    assert loads == []
    without_line_ends(given)
    choose_tokenizer(find_shards(data_dir), given)
    assert loads == [str(given)]
    with_two_ids_exchanged(given)
    with pytest.raises(OtherTokenizer, match="fingerprint"):
        choose_tokenizer(find_shards(data_dir), given)


def test_a_loader_is_pickled_with_its_tokenizer_loaded_or_not(data_dir: Path, loads: list[str]) -> None:
    with get_llama3_dataloader(data_dir, 2, num_workers=0, rank=0, world_size=1) as loader:
        again = pickle.loads(pickle.dumps(loader))
        assert loads == []
        assert again.tokenizer.pad_token_id == loader.tokenizer.pad_token_id
