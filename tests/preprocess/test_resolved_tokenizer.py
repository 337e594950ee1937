"""A tokenizer that planning reads without transformers has the files and ids that transformers gives."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from preprocess.plan import tokenizer as resolved_tokenizer
from preprocess.plan.tokenizer import (
    describe_tokenizer,
    plain_files,
    read_files,
    resolve_tokenizer,
    save_tokenizer,
)
from shardprep.errors import NotFound, UsageError
from tests.checkout import ROOT
from tests.children import run_child
from tests.word_tokenizers import save_word_tokenizer

if TYPE_CHECKING:
    from tests.conftest import Prep

Change = Callable[[Path], None]


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_bytes()) if path.exists() else {}
    path.write_text(json.dumps({**data, **changes}), encoding="utf-8")


def config(**changes: Any) -> Change:
    return lambda folder: edit(folder / "tokenizer_config.json", **changes)


def tokenizer_json(**changes: Any) -> Change:
    return lambda folder: edit(folder / "tokenizer.json", **changes)


def with_decoder(folder: Path) -> None:
    """As Llama 3 on the hub: all added tokens in the configuration, too, and a model's config beside it."""
    added = json.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
    decoder = {str(token.pop("id")): token for token in added}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=decoder, model_max_length=131072)
    edit(folder / "config.json", model_type="llama", transformers_version="4.40.0")
    edit(folder / "special_tokens_map.json", bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")


def old_merges(folder: Path) -> None:
    """Merges as texts and no ignore_merges, as older versions of tokenizers wrote them."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_bytes())
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    del data["model"]["ignore_merges"]
    path.write_text(json.dumps(data), encoding="utf-8")


def as_it_is(_: Path) -> None:
    pass


def broken(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def word_level(folder: Path) -> None:
    shutil.rmtree(folder)
    save_word_tokenizer(folder, 50)


def word_piece(folder: Path) -> None:
    vocab = {"[UNK]": 0, "a": 1, "##b": 2, "[CLS]": 3, "[SEP]": 4}
    words = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.add_special_tokens([AddedToken("[UNK]"), AddedToken("[CLS]"), AddedToken("[SEP]")])
    words.post_processor = processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3))
    words.decoder = decoders.WordPiece()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", cls_token="[CLS]")
    fast.save_pretrained(folder)


def unigram(folder: Path) -> None:
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581a", -1.5), ("b", -2.25)], 0, False))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=pieces).save_pretrained(folder)


PLAIN: dict[str, Change] = {
    "trained here": as_it_is,
    "as on the hub": with_decoder,
    "older merges": old_merges,
    "without a post-processor": tokenizer_json(post_processor=None),
    "words": word_level,
    "word pieces": word_piece,
    "unigram": unigram,
    "a chat template": config(chat_template="{{ messages }}"),
    "the class of transformers 5": config(tokenizer_class="TokenizersBackend", backend="tokenizers"),
}
NOT_PLAIN: dict[str, Change] = {
    "a token in the configuration alone": config(mask_token="<|mask|>"),
    "a listed token in the configuration alone": config(additional_special_tokens=["<|mask|>"]),
    "a BOS switched on": config(add_bos_token=True),
    "an unknown key": config(split_special_tokens=True),
    "another class": config(tokenizer_class="GPT2Tokenizer"),
    "no class": config(tokenizer_class=None),
    "another model": lambda folder: edit(folder / "config.json", model_type="qwen2"),
    "a class in the model's configuration": lambda folder: edit(folder / "config.json", tokenizer_class="X"),
    "tokens of another file": lambda folder: edit(folder / "added_tokens.json", more=600),
    "a pad token of another file": lambda folder: edit(
        folder / "special_tokens_map.json", pad_token="<|end_of_text|>"
    ),
    "truncation": tokenizer_json(
        truncation={"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    ),
    "no JSON": broken,
    "a token of other flags": lambda folder: edit(
        folder / "tokenizer_config.json",
        added_tokens_decoder={
            "512": {"content": "<|begin_of_text|>", "lstrip": True, "normalized": False, "rstrip": False,
                    "single_word": False, "special": True}
        },
    ),
}  # fmt: skip


@pytest.fixture
def model_dir(prep: Prep, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prep.model_dir, tmp_path / "model"))


def check_equal_to_transformers(model: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    resolved = resolve_tokenizer(str(model), ours, allow_special_tokens=False)
    save_tokenizer(str(model), theirs)
    assert (ours / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    assert resolved.spec == describe_tokenizer(ours, str(model)) == describe_tokenizer(theirs, str(model))
    again = tmp_path / "again"
    save_tokenizer(str(ours), again)  # as training loads it from the data set
    assert (again / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        resolved_tokenizer, "_save_in_own_process", lambda model, _: pytest.fail(f"transformers for {model}")
    )


@pytest.mark.usefixtures("no_transformers")
@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_tokenizer_is_read_without_transformers_and_equals_its(
    model_dir: Path, tmp_path: Path, kind: str
) -> None:
    PLAIN[kind](model_dir)
    check_equal_to_transformers(model_dir, tmp_path)


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_transformers_may_change_is_left_to_transformers(model_dir: Path, kind: str) -> None:
    files = read_files(model_dir)
    assert files is not None
    assert plain_files(files) is not None, "it was plain"
    NOT_PLAIN[kind](model_dir)
    files = read_files(model_dir)
    assert files is not None
    assert plain_files(files) is None


def test_another_major_version_of_transformers_is_asked_again(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = read_files(model_dir)
    assert files is not None
    monkeypatch.setattr(resolved_tokenizer, "version", lambda _: "6.0.1")
    assert plain_files(files) is None


@pytest.mark.processes
def test_what_transformers_says_of_a_model_comes_out_of_its_own_process(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="no usable tokenizer was found in the folder"):
        resolve_tokenizer(str(tmp_path / "empty"), tmp_path, allow_special_tokens=False)


@pytest.mark.processes
def test_planning_never_imports_torch_and_its_process_no_transformers(
    prep: Prep, model_dir: Path, sample_dir: Path, tmp_path: Path
) -> None:
    """Also where transformers is needed, which imports torch if it finds one."""
    config(mask_token="<|mask|>")(model_dir)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise ImportError('torch was imported')\n"
    )
    program = (
        "import sys; from preprocess.__main__ import main; code = main(sys.argv[1:]);"
        "print('loaded', *({'torch', 'transformers'} & set(sys.modules))); sys.exit(code)"
    )
    flags = ["--input_dir", sample_dir, "--output_dir", tmp_path / "data", "--model_id", model_dir]
    command = [sys.executable, "-c", program, "plan", *map(str, flags)]
    ended = run_child(command, env={**prep.environ(), "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert ended.stdout.splitlines()[-1].split() == ["loaded"]
    assert not (tmp_path / "imported").exists()
    tokens = json.loads((tmp_path / "data" / "tokenizer" / "tokenizer.json").read_bytes())["added_tokens"]
    assert "<|mask|>" in {token["content"] for token in tokens}, "transformers was asked"


@pytest.mark.processes
def test_a_model_with_several_chat_templates_is_planned_and_keeps_them(
    prep: Prep, model_dir: Path, sample_dir: Path, tmp_path: Path
) -> None:
    """transformers saves them as files of a folder of their own; a planned tokenizer has no folders."""
    templates = {"default": "{{ messages[0].content }}", "tools": "tools: {{ messages[0].content }}"}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(model_dir)
    assert (model_dir / "additional_chat_templates").is_dir()
    data = tmp_path / "data"
    ended = prep.command("plan", "--input_dir", sample_dir, "--output_dir", data, "--model_id", model_dir)
    assert ended.code == 0, ended.text
    kept = PreTrainedTokenizerFast.from_pretrained(data / "tokenizer")
    assert kept.chat_template == templates


def test_a_tokenizer_with_dropout_is_refused_when_planning(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(prep.model_dir, tmp_path / "model"))
    data = json.loads((model / "tokenizer.json").read_bytes())
    data["model"]["dropout"] = 0.1
    (model / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UsageError):
        prep.plan(sample_dir, tmp_path / "data", model_id=str(model))
    data["model"]["dropout"] = None
    (model / "tokenizer.json").write_text(json.dumps(data))
    prep.plan(sample_dir, tmp_path / "data", model_id=str(model))
