"""Tokenizers and engines: every engine gives the ids of transformers, and training loads the same tokenizer.

By default some lines of the corpora are encoded; ``LLAMA3_LINES=all`` (``make torture``) encodes all, also in
batches of 7 documents.
"""

from __future__ import annotations

import functools
import gzip
import importlib.metadata
import io
import itertools
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import threading
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import gigatoken.gigatoken_rs
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from loader import NotFound, get_llama3_dataloader
from tests import chat_sets
from tests.checkout import ROOT
from tests.children import environ_of_children, run_child, shardprep
from tests.external_tars import write_numbered_tars
from tests.forged import rewrite_plan
from tests.word_tokenizers import save_word_tokenizer
from tests.world import BOS, EOS, TURN, World, flags_of, save_tokenizer

pytestmark = pytest.mark.long

Change = Callable[[Path], Any]


def edit(path: Path, **changes: Any) -> None:
    """Set values of a JSON file; dicts are merged into existing objects."""
    data = json.loads(path.read_bytes()) if path.exists() else {}
    for name, value in changes.items():
        data[name] = {**data[name], **value} if isinstance(value, dict) and data.get(name) else value
    path.write_text(json.dumps(data), encoding="utf-8")


def file_of(name: str, **values: Any) -> Change:
    return lambda folder: edit(folder / name, **values)


config = functools.partial(file_of, "tokenizer_config.json")


def with_decoder(folder: Path) -> None:
    """Add what Llama 3 has on the hub: added tokens in the configuration, and the config of a model."""
    added = json.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
    decoder = {str(token.pop("id")): token for token in added}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=decoder, model_max_length=131072)
    edit(folder / "config.json", model_type="llama", transformers_version="4.40.0")
    edit(folder / "special_tokens_map.json", bos_token=BOS, eos_token=EOS)


def old_merges(folder: Path) -> None:
    """Write merges as strings, like older versions of tokenizers."""
    merges = json.loads((folder / "tokenizer.json").read_bytes())["model"]["merges"]
    edit(folder / "tokenizer.json", model={"merges": [" ".join(pair) for pair in merges]})


PLAIN: dict[str, Change] = {
    "as it is": lambda folder: None,
    "as on the hub": with_decoder,
    "older merges": old_merges,
    "without a post-processor": file_of("tokenizer.json", post_processor=None),
    "words": lambda folder: save_word_tokenizer(folder, 50),
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
    "another model": file_of("config.json", model_type="qwen2"),
    "a class in the model's configuration": file_of("config.json", tokenizer_class="X"),
    "tokens of another file": file_of("added_tokens.json", more=600),
    "a pad token of another file": file_of("special_tokens_map.json", pad_token=EOS),
    "truncation": file_of("tokenizer.json", truncation={"max_length": 9}),
    "no JSON": lambda folder: (folder / "tokenizer.json").write_text("{"),
    "a token of other flags": config(added_tokens_decoder={"281": {"content": BOS}}),
}


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it impossible to start the process in which plan uses transformers."""
    monkeypatch.setattr(subprocess, "Popen", mock.Mock(side_effect=BlockingIOError))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Some text, and a tokenizer to change, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = save_tokenizer(tmp_path / "model")
    return World(tmp_path, tokenizer=model).raw(
        {"a.txt": f"a <|end_of_text|> line\n도서관\nhello {'z' * 300}!\n"}
    )


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_tokenizer_is_read_without_transformers_and_loads_equally(world: World, kind: str) -> None:
    """The data set keeps only its files, and tasks need no others."""
    PLAIN[kind](world.tokenizer)
    (world.tokenizer / "model.safetensors").write_bytes(b"weights")
    world.plan(num_shards=1)
    ours, theirs = world.data_dir / "tokenizer", world.data_dir / "theirs"
    for source in (world.tokenizer, ours):  # the model's folder, and the data set's as training loads it
        AutoTokenizer.from_pretrained(source).save_pretrained(theirs)
        assert (ours / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    tokenizer, planned = AutoTokenizer.from_pretrained(ours), world.plan_json()["tokenizer"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert planned[name] == getattr(tokenizer, name), name
    assert planned["vocab_size"] == len(tokenizer)
    assert not {path.name for path in ours.iterdir()} & {"model.safetensors", "config.json"}
    shutil.rmtree(world.tokenizer)
    world.run().verify()


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_tokenizer_that_transformers_may_change_is_loaded_by_transformers(world: World, kind: str) -> None:
    NOT_PLAIN[kind](world.tokenizer)
    assert world.try_plan().code == 74, "its process cannot start"


@pytest.mark.usefixtures("no_process")
def test_even_a_plain_tokenizer_is_loaded_by_an_unknown_version_of_transformers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: SimpleNamespace(version="6.0.1"))
    assert world.try_plan().code == 74


@pytest.mark.processes
def test_a_second_plan_uses_the_cached_tokenizer_but_not_a_damaged_entry(
    world: World, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It repeats the warning that transformers gives other ids than tokenizer.json."""
    config(tokenizer_class="GPT2Tokenizer", add_prefix_space=True)(world.tokenizer)
    told = world.try_plan(num_shards=1).ends(0).text
    request.getfixturevalue("no_process")
    again = World(tmp_path / "again", tokenizer=world.tokenizer, raw_dir=world.raw_dir)
    told_again = again.try_plan(num_shards=1).ends(0).text
    assert again.plan_json() == world.plan_json()
    warnings = [
        [line for line in text.splitlines() if "GPT2Tokenizer" in line] for text in (told, told_again)
    ]
    assert warnings[0] == warnings[1] != []
    assert "GPT2Tokenizer" in world.main("doctor", model_id=world.tokenizer).out
    for path in [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]:
        intact = path.read_bytes()
        path.write_bytes(intact[:9] + bytes([intact[9] ^ 1]) + intact[10:])
        assert again.try_plan(num_shards=1, output_dir=tmp_path / "damaged").code == 74, path
        path.write_bytes(intact)
    path.unlink()
    assert again.try_plan(num_shards=1, output_dir=tmp_path / "gone").code == 74


def with_code(folder: Path) -> Path:
    """Give the tokenizer a class whose code, if it runs, creates a file. Returns the path of that file."""
    marker, own = folder.with_name("marker"), {"auto_map": {"AutoTokenizer": [None, "own.StrangeTokenizer"]}}
    edit(folder / "tokenizer_config.json", tokenizer_class="StrangeTokenizer", **own)
    edit(folder / "config.json", model_type="strange", **own)
    code = f"open({str(marker)!r}, 'w').close()\n"
    code += "from transformers import PreTrainedTokenizerFast as StrangeTokenizer\n"
    (folder / "own.py").write_text(code)
    return marker


def without_tokenizer_json(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    edit(folder / "config.json", model_type="t5")


def splitting(unknown: str, pattern: str) -> Change:
    def save(folder: Path) -> None:
        tokens = ["<unk>", "<s>", "</s>"]
        vocab = {token: number for number, token in enumerate([*tokens, "hello"])}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.add_special_tokens(tokens)
        names = dict(zip(("unk_token", "bos_token", "eos_token"), tokens, strict=True))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<unk>", **names).save_pretrained(
            folder
        )

    return save


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0a" * 32 + "\nsize 12345\n"
# Kind -> a change, the exit code of plan, and what the error names.
REFUSED: dict[str, tuple[Change, int, str]] = {
    "dropout": (file_of("tokenizer.json", model={"dropout": 0.1}), 2, "model.dropout"),
    "a pointer": (lambda it: (it / "tokenizer.json").write_text(POINTER), 66, "git lfs pull"),
    "it raises for a word": (splitting("[UNK]", " "), 65, ""),
    "its pattern gives up on the probe, in a panic of Rust": (splitting("<unk>", "(a|aa)+$"), 65, ""),
    "its pattern gives up on a document": (splitting("<unk>", "(z|zz)+$"), 65, ""),
    "an empty folder": (lambda it: [path.unlink() for path in it.iterdir()], 66, "model"),
    "a slow one": (without_tokenizer_json, 2, "ByT5Tokenizer"),
}
# Found in a process: by transformers, or by tokenizers with an unknown regular expression.
BY_PROCESS = tuple(
    kind for kind in REFUSED if kind in ("an empty folder", "a slow one") or "gives up" in kind
)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.processes] * (kind in BY_PROCESS)) for kind in REFUSED]
)
def test_a_tokenizer_that_cannot_be_used_is_refused_by_name(world: World, kind: str) -> None:
    change, code, named = REFUSED[kind]
    change(world.tokenizer)
    world.try_plan().ends(code, named, world.tokenizer)
    assert not (world.data_dir / "plan.json").exists()


@pytest.mark.processes
def test_planning_runs_no_code_of_a_tokenizers_folder(world: World, tmp_path: Path) -> None:
    marker = with_code(world.tokenizer)
    environ = environ_of_children(HF_MODULES_CACHE=str(tmp_path / "modules"))
    ended = run_child(shardprep("plan", *world.words_of_plan()), code=66, stdin="y\n" * 9, env=environ)
    assert not marker.exists(), "its code ran"
    assert str(world.tokenizer) in ended.stderr


def test_the_loader_runs_no_code_of_a_tokenizers_folder(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = with_code(world.tokenizer)
    tars = write_numbered_tars(tmp_path, 9, 1)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    with pytest.raises(NotFound) as found:
        get_llama3_dataloader(tars, 1, world.tokenizer, num_workers=0)
    assert not marker.exists(), "its code ran"
    assert str(world.tokenizer) in str(found.value)


def test_peek_names_a_damaged_tokenizer_json_and_report_does_not_need_it(world: World) -> None:
    world.plan().run()
    path = world.data_dir / "tokenizer" / "tokenizer.json"
    for damaged in ("", "[]", '{"model": {', '{"added_tokens": [1], "model": {}}'):
        path.write_text(damaged)
        report = json.loads(world.main("report", world.data_dir, json=True).ends(0).out)
        assert report["shards"]["num_done"] == 2
        world.main("peek", world.data_dir).ends(78, path)


# Kind -> name of a tokenizer, and values of its configuration.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaTokenizer, legacy": ("Llama 2", {"tokenizer_class": "LlamaTokenizer", "legacy": True}),
    "the plain class": ("bytes", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "GPT2Tokenizer, with a space before": (
        "bytes", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "add_bos_token": True}
    ),
    "GPT2Tokenizer, over another splitter": ("bytes, split", {"tokenizer_class": "GPT2Tokenizer"}),
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_of_a_data_set_loads_as_the_one_that_made_its_shards(tmp_path: Path, kind: str) -> None:
    """With all its chat templates, though a planned tokenizer has no folder of templates."""
    name, values = KINDS[kind]
    model = chat_sets.save_tokenizer(name, tmp_path / "model")
    edit(model / "tokenizer_config.json", **values, padding_side="left", model_max_length=77)
    if not kind.startswith("the plain"):
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tools.jinja").write_text("tools: {{ messages }}")
        (model / "chat_template.jinja").write_text("{{ messages }}")
    rng, parts = random.Random(7), ["hello", " ", "moon", "<think>", "one", ",", "don't", "안녕", "바다"]
    parts += ["e\u0301", "ＡＢ", "½", "▁", "\u200b", " ", "hello wor", "한", "👩‍👧"]
    lines = sorted({"".join(rng.choices(parts, k=9)).strip() for _ in range(100)})
    world = World(tmp_path, tokenizer=model).raw({"a.txt": "\n".join(lines)})
    told = world.try_plan(num_shards=1).ends(0).text
    world.run(0).verify()
    expected = AutoTokenizer.from_pretrained(str(model))
    ids = expected(lines)["input_ids"]
    # Whoever uses tokenizer.json alone may get other ids: plan says so, and what to do.
    own_ids = [
        encoding.ids for encoding in Tokenizer.from_file(str(model / "tokenizer.json")).encode_batch(lines)
    ]
    assert ("tokenizer.json alone" in told) == (ids != own_ids)
    if ids != own_ids:
        assert str(values["tokenizer_class"]) in told
    if ids != own_ids and (TAKES_ALL or kind.startswith("Llama")):  # this plan takes 2 s
        edit(model / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        shutil.rmtree(model / "additional_chat_templates")
        plain = World(tmp_path / "plain", tokenizer=model, raw_dir=world.raw_dir)
        assert "tokenizer.json alone" not in plain.try_plan(num_shards=1).text
        assert [made for _, _, made in plain.run(0).documents()] == own_ids
    assert [(text, made) for _, text, made in world.documents()] == list(zip(lines, ids, strict=True))
    with world.loader(batch_size=2) as loader:
        loaded = loader.tokenizer
    for found in (loaded, AutoTokenizer.from_pretrained(str(world.data_dir / "tokenizer"))):
        assert found(lines)["input_ids"] == ids
        assert found.batch_decode(ids) == expected.batch_decode(ids)
        assert found.special_tokens_map == expected.special_tokens_map
        assert (found.padding_side, found.model_max_length) == ("left", 77)
        assert found.chat_template == expected.chat_template
        assert (found.chat_template is None) == kind.startswith("the plain")


LINES = ["Snow falls in winter.", "겨울에는 눈이 내립니다.", "Tea is ready after 4 minutes!"]
# Tokenizer -> ids that it puts before and after a text.
FAMILIES: dict[str, tuple[list[int], list[int]]] = {
    "bytes": ([], []),  # like Qwen
    "bytes, BOS": ([0], []),  # like Llama
    "bytes, Roberta": ([0], [1]),
    "Bert, cased": ([0], [1]),
}


def printed_ends(text: str) -> list[str]:
    """Return the tokens with which documents begin and end, as a command prints them."""
    (line,) = (line for line in text.splitlines() if "documents begin" in line)
    return re.findall(r"<\S+>", line)


@pytest.mark.parametrize("adds", [True, False], ids=["added", "bare"])
@pytest.mark.parametrize("family", FAMILIES)
def test_plan_and_doctor_print_the_tokens_that_begin_and_end_documents(
    tmp_path: Path, family: str, adds: bool
) -> None:
    model = chat_sets.save_tokenizer(family, tmp_path / "model")
    before, after = ([chat_sets.SPECIAL[number] for number in ids if adds] for ids in FAMILIES[family])
    reference = AutoTokenizer.from_pretrained(model)
    expected = [reference.encode(line, add_special_tokens=adds) for line in LINES]
    world = World(tmp_path, tokenizer=model).raw({"a.txt": "\n".join(LINES)})
    assert printed_ends(world.try_plan(num_shards=1, add_special_tokens=adds).text) == before + after
    assert [ids for _, _, ids in world.run(0).documents()] == expected
    assert printed_ends(world.main("doctor", output_dir=world.data_dir).text) == before + after
    rows = World(tmp_path, tokenizer=model, data_dir=tmp_path / "rows")
    planned = rows.try_plan(num_shards=1, add_special_tokens=adds, record="packed", seq_len=4096)
    assert printed_ends(planned.text) == [*before, chat_sets.EOT]
    end = reference.eos_token_id
    once = [token for ids in expected for token in (ids if ids[-1:] == [end] else [*ids, end])]
    assert rows.run(0).samples()[0]["input_ids"] == once


def test_an_eos_that_the_tokenizer_lacks_is_not_advised(world: World) -> None:
    assert "--append_eos adds it" in world.try_plan(num_shards=1).text
    config(eos_token=None)(world.tokenizer)
    told = world.try_plan(num_shards=1, output_dir=world.data_dir.with_name("other")).text
    assert ("eos_token" in told, "--append_eos" in told) == (True, False)


SOME = ["안녕", "words", "한", "more words", "글"]


@pytest.mark.parametrize("options", [{}, {"record": "packed", "seq_len": 8, "append_eos": False}], ids=str)
@pytest.mark.parametrize("texts", [SOME, SOME[::2], []], ids=["some", "all", "no documents"])
def test_documents_without_ids_are_kept(world: World, texts: list[str], options: dict[str, Any]) -> None:
    """The tokenizer drops everything except ASCII, and adds no special tokens."""
    path = world.tokenizer / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Replace(Regex(r"[^\x20-\x7e]+"), "")
    tokenizer.save(str(path))
    world.raw({"a.txt": "\n".join(texts)}).plan(num_shards=1, add_special_tokens=False, **options).run()
    assert world.main("report", world.data_dir, output=world.data_dir / "page.html").code == 0
    report = world.main("report", world.data_dir, json=True)
    assert (report.code, json.loads(report.out)["counts"]["num_documents"]) == (0, len(texts))
    if texts and not options:
        for address in ("", "0:0", "a.txt:0"):
            shown = world.main("peek", world.data_dir, *address.split())
            assert shown.code == 0
            sizes = re.findall(r"^shard-.*: (\d+) ", shown.out, re.MULTILINE)
            assert [int(size) > 0 for size in sizes] == [text.isascii() for text in texts][: len(sizes)]


# Models and data sets on the hub.

SHA = "0123456789abcdef0123456789abcdef01234567"


class Answers(SimpleHTTPRequestHandler):
    """Serve requests of ``huggingface_hub`` from files of a folder. Without the folder, do not answer."""

    asked: ClassVar[list[str]] = []

    def send_head(self) -> Any:
        self.asked.append(self.path)
        if Path(self.directory).exists():
            return super().send_head()
        self.close_connection = True
        return None

    def end_headers(self) -> None:
        self.send_header("ETag", f'"{zlib.crc32(self.path.encode()):08x}"')
        self.send_header("X-Repo-Commit", SHA)
        super().end_headers()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A local server that other processes use as the hub; it serves the world's raw files."""
    place = World(tmp_path, raw_dir=tmp_path / "hub")
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Answers, directory=str(place.raw_dir))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        Answers.asked.clear()
        yield place
        server.shutdown()


def add_repository(hub: World, name: str, files: dict[str, bytes]) -> None:
    """Serve "models/NAME" or "datasets/NAME" with these files."""
    listed = [{"type": "file", "path": path, "size": len(raw), "oid": SHA} for path, raw in files.items()]
    found = {"id": name.partition("/")[2], "sha": SHA, "siblings": []}
    hub.raw({f"api/{name}/revision/main": json.dumps(found), f"api/{name}/tree/{SHA}": json.dumps(listed)})
    hub.raw({f"{name.removeprefix('models/')}/resolve/{SHA}/{path}": raw for path, raw in files.items()})


def plan(place: Path, *, code: int, **flags: object) -> str:
    """Plan in a process and return its output."""
    environ = environ_of_children(HF_HUB_OFFLINE="0")
    done = run_child(shardprep("plan", *flags_of(flags)), cwd=place, env=environ, code=code)
    return done.stdout + done.stderr


@pytest.mark.processes
def test_a_model_on_the_hub_is_downloaded_once(hub: World, world: World, tmp_path: Path) -> None:
    """The error for one that cannot be downloaded has the command to type."""
    files = {path.name: path.read_bytes() for path in world.tokenizer.iterdir()}
    files |= {"vocab.txt": b"", "model.safetensors": b"not fetched"}
    flags = {"input_dir": world.raw_dir, "model_id": "some/model"}
    hub.raw_dir.rmdir()
    assert "hf download some/model " in plan(tmp_path, code=66, output_dir="none", **flags)
    assert sum("some/model" in path for path in Answers.asked) == 1
    add_repository(hub, "models/some/model", files)
    plan(tmp_path, code=0, output_dir="first", **flags)
    assert not any("safetensors" in path for path in Answers.asked)
    shutil.rmtree(hub.raw_dir)
    num_asked = len(Answers.asked)
    for name in ("complete", "as transformers leaves it, without files that it does not need"):
        plan(tmp_path, code=0, output_dir=name, **flags)
        for path in tmp_path.glob("hf/hub/*/snapshots/*/vocab.txt"):
            path.unlink()
    assert len(Answers.asked) - num_asked <= 4, "there are few retries if the hub does not answer"
    plans = [json.loads(path.read_bytes())["plan_id"] for path in tmp_path.glob("*/plan.json")]
    assert (len(plans), len(set(plans))) == (3, 1)


@pytest.mark.processes
def test_a_data_set_on_the_hub_is_refused_with_a_command(hub: World, world: World, tmp_path: Path) -> None:
    lines = b"".join(b'{"input": "question %d", "output": "answer"}\n' % number for number in range(20))
    add_repository(hub, "datasets/some/questions", {"README.md": b"# card", "data/train.jsonl": lines})
    model = tmp_path / "model of mine"
    model.symlink_to(world.tokenizer)
    flags = {"output_dir": "data", "model_id": model, "text_template": r"{input}\n\n{output}"}
    said = plan(tmp_path, code=66, input_dir="some/questions", **flags)
    found = re.search(r"(hf download .* --local-dir RAW); then plan --input_dir RAW --recursive", said)
    assert found
    run_child(["bash", "-euc", found[1]], cwd=tmp_path, env=environ_of_children(HF_HUB_OFFLINE="0"))
    plan(tmp_path, code=0, input_dir="RAW/data", **flags)
    assert world.inputs() == ["train.jsonl"]


# Engines.

TAKES_ALL = os.environ.get("LLAMA3_LINES") == "all"
# Parts of texts: token names, the engine's separator between documents, code points of new Unicode versions.
PARTS = [EOS, BOS, "\0\1document\2", "\0\1docu", "ment\2", "<|", "|>", "end_of_text", "\u088f", "\U000323b0"]
PARTS += ['"\0\1document\2', "a", " ", "가", "\n", "1", "'s", "\U0001f600", "é", "\u0301", "\r", "\u3000"]


def hostile_records(step: int) -> list[dict[str, str]]:
    """Return records with code points in the contexts that patterns distinguish, token names and long runs.

    Code points are all below U+0800, and one in ``step`` above.
    """
    points = [*range(0x800), *range(0x800, 0x110000, step)]
    texts = [f"a{c}b {c}가 {c}{c}1'{c}\n{c}" for c in map(chr, points) if not "\ud800" <= c <= "\udfff"]
    rng = random.Random(0)
    texts += ["".join(rng.choices(PARTS, k=rng.randrange(1, 12))) for _ in range(1000)]
    texts += [character * 4_000 for character in "a 가!9\n\t"]
    return [{"text": text} for text in texts]


def engine_of(world: World) -> str:
    return str(world.manifests()[0]["run"]["engine"]).split()[0]


BARE = {"allow_special_tokens": True, "add_special_tokens": False}
MODELS: list[tuple[str, dict[str, Any]]] = [("small", {}), ("small", BARE), ("llama3", {})]
MODELS += [("llama3", BARE)] * TAKES_ALL


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), MODELS, ids=str)
def test_engines_agree_with_each_other_and_with_transformers_on_any_text(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """Code points, token names, long runs, and for Llama 3's tokenizer lines of the corpora."""
    model, is_real = save_tokenizer(tmp_path / name), name == "llama3"
    if is_real:
        model = Path(request.getfixturevalue("shared_dir")) / "tokenizers" / name
    world = World(tmp_path, tokenizer=model)
    world.raw({"a.jsonl": hostile_records(1 if TAKES_ALL and not options else 4093)})
    if is_real:
        for path in request.getfixturevalue("corpora_dir").iterdir():
            with path.open("rb") as file:
                world.raw({path.name: b"".join(itertools.islice(file, 0, None, 1 if TAKES_ALL else 1000))})
    # Each shard loads the tokenizer, which takes 2 s for Llama 3's.
    is_short = is_real and not TAKES_ALL
    world.plan(num_shards=1 if is_short else 2, **options)
    expected = world.copy(tmp_path / "reference").run(engine="tokenizers")
    for batch in ("",) if is_short else ("", "7"):
        fast = world.copy(tmp_path / f"fast {batch}")
        for number in range(world.num_shards):
            fast.try_shard(number, engine="gigatoken", environ={"DATASET_BATCH_SIZE": batch}).ends(0)
        assert engine_of(fast) == "gigatoken"
        assert fast.contents() == expected.contents()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    end, documents = tokenizer.convert_tokens_to_ids(EOS), expected.documents()
    for _, text, ids in documents[:: 10 if TAKES_ALL else 40]:
        call = {"add_special_tokens": not options, "split_special_tokens": not options}
        assert ids == tokenizer.encode(text, **call)
    assert len(documents) > 3_000
    named = [ids for _, text, ids in documents if EOS in text]
    assert named
    assert all((end in ids) == bool(options) for ids in named), "token names stay text unless allowed"


def test_a_small_file_with_much_text_is_encoded_by_the_fast_engine(tmp_path: Path) -> None:
    """The reference would take 500 bytes of memory per token of a long document."""
    for text, is_fast in (("a word " * 60_000, True), ("a word " * 60, False)):
        world = World(tmp_path / str(is_fast)).raw({"a.txt.gz": gzip.compress(text.encode())})
        assert world.plan(num_shards=1).plan_json()["fast_engine_is_equal"] == is_fast


@pytest.mark.slow
def test_the_fast_engine_gets_no_useless_merges_and_gives_equal_ids(tmp_path: Path) -> None:
    rng, model = random.Random(0), tmp_path / "model"
    words = ["".join(letters) for size in range(2, 9) for letters in itertools.product("ab", repeat=size)]
    tokens = rng.sample(words, 100)  # some of them cannot be reached by merges
    tokens += sorted({word[:end] for word in tokens for end in range(2, len(word))} - {*tokens})
    # Like a tokenizer converted from ranks, with a merge for each way to split a token in two.
    vocab = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *tokens]
    cuts = [(token[:end], token[end:]) for token in tokens for end in range(1, len(token))]
    merges = [cut for cut in cuts if {*cut} <= {*vocab}]
    rng.shuffle(merges)
    bpe = Tokenizer(models.BPE({token: number for number, token in enumerate(vocab)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=EOS).save_pretrained(model)
    texts = ["a", *("".join(rng.choices("aaabbb ", k=rng.randrange(1, 30))) for _ in range(3000))]
    world = World(tmp_path, tokenizer=model).raw({"a.jsonl": [{"text": text} for text in texts]})
    expected = world.plan(num_shards=1, engine="gigatoken").copy(tmp_path / "reference")
    files = {path.name: json.loads(path.read_bytes()) for path in (world.data_dir / "tokenizer").iterdir()}
    kept = files["fast_tokenizer.json"]["model"].pop("merges")
    assert len(kept) < len(files["tokenizer.json"]["model"].pop("merges"))
    assert files["fast_tokenizer.json"] == files["tokenizer.json"]
    world.try_shard(0, engine="gigatoken").ends(0)
    assert world.contents() == expected.run(engine="tokenizers").contents()


class PanicException(BaseException):
    """The exception that a panic in Rust becomes."""


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The texts that gigatoken gets."""
    given: list[bytes] = []
    real = gigatoken.gigatoken_rs.BytesSource
    monkeypatch.setattr(gigatoken.gigatoken_rs, "BytesSource", lambda data: given.append(data) or real(data))
    return given


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A plan of enough text for plan to compare the engines."""
    world = World(tmp_path_factory.mktemp("planned"))
    return world.raw({"a.txt": "the kettle sings, and nobody's listening 12345\n" * 8000}).plan(num_shards=1)


def load_another(patch: pytest.MonkeyPatch, folder: Path, kind: str, sources: list[bytes]) -> None:
    """Make gigatoken panic, refuse, or return a last id that is too large, for all texts or for some."""
    load = gigatoken.gigatoken_rs.load_hf_json

    def load_hf_json(raw: bytes) -> Any:
        if kind == "panics":
            raise PanicException("index out of bounds")
        if kind == "refuses":
            raise ValueError("unsupported pre-tokenizer")
        backend = load(raw)

        def encode(*args: Any, **options: Any) -> Any:
            rows, more = backend.encode_batch_padded(*args, **options)
            if kind == "wrong" or (kind == "wrong on an ideograph" and "\u3404".encode() in sources[-1]):
                rows[0][-1] += 1
            return rows, more

        return SimpleNamespace(encode_batch_padded=encode)

    forget_engines(folder)
    patch.setattr(gigatoken.gigatoken_rs, "load_hf_json", load_hf_json)


def forget_engines(folder: Path) -> None:
    """Load another tokenizer, because a process caches the last one."""
    other = World(folder, tokenizer=save_tokenizer(folder / "model")).raw({"a.txt": "a\n"})
    edit(other.tokenizer / "tokenizer.json", model={"merges": []})
    other.plan(num_shards=1).try_shard(0, engine="gigatoken")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["right", "wrong", "panics", "refuses"])
def test_a_fast_engine_that_is_wrong_or_fails_is_replaced_by_the_reference(
    planned: World, sources: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    load_another(monkeypatch, tmp_path / "other", kind, sources)
    world = planned.copy(tmp_path)
    ended = world.try_shard(0).ends(0)
    assert engine_of(world) == ("gigatoken" if kind == "right" else "tokenizers")
    assert ("gigatoken cannot" in ended.text) == (kind != "right")
    (world.data_dir / "shard-00000.json").unlink()
    assert world.try_shard(0, engine="gigatoken").code == (0 if kind == "right" else 2)


@pytest.mark.slow
def test_plan_compares_engines_on_all_code_points_once_and_one_wrong_id_decides(
    planned: World, sources: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        load_another(patch, tmp_path / "other", "wrong on an ideograph", sources)
        doubted = World(tmp_path / "doubted", raw_dir=planned.raw_dir).plan(num_shards=1)
        assert not doubted.plan_json()["fast_engine_is_equal"]
    assert engine_of(doubted.run()) == "tokenizers"
    forget_engines(tmp_path / "another")
    sources.clear()
    sure = World(tmp_path / "sure", raw_dir=planned.raw_dir).plan(num_shards=1)
    assert sure.plan_json()["fast_engine_is_equal"]
    seen = set(b"".join(sources).decode())
    old = unicodedata.ucd_3_2_0
    points = (chr(point) for point in range(0x10000) if old.category(chr(point)) not in ("Cn", "Cs"))
    assert {point for point in points if point not in seen} == set()
    sources.clear()
    World(tmp_path / "again", raw_dir=planned.raw_dir).plan(num_shards=1)
    assert sum(map(len, sources)) < 1 << 20, "the verdict is cached"


@pytest.mark.slow
def test_a_reference_engine_with_other_ids_than_the_plan_is_refused(planned: World, tmp_path: Path) -> None:
    """As if another version of tokenizers had planned: the probe's hash in plan.json differs."""
    world = planned.copy(tmp_path)
    probe = world.plan_json()["probe_sha256"]
    rewrite_plan(world.data_dir / "plan.json", f'"{probe}"', f'"{"0" * 64}"')
    for engine in ("auto", "tokenizers"):
        world.try_shard(0, engine=engine).ends(78, "tokenizers")


SCRIPT = ROOT / "benchmarks" / "baseline.py"


@pytest.mark.parametrize("flags", [["--shard_id"], ["--shard-id", "--allow-special-tokens"]], ids=str)
def test_the_plain_form_writes_the_members_of_the_baseline_except_for_control_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    """Inputs have empty lines, all line ends, spaces, a byte order mark and token names."""
    odd = ["", "  \t ", "\u3000둘러싸인 \x0b", "a\u2028b\x85c", "\ufeff표", "끝 \\ \" ' {}", "the kettle"] * 9
    ends = itertools.cycle(["\n", "\r\n", "\n", "\r"])
    text = "\ufeff" + "".join(line + next(ends) for line in odd) + "no line end"
    control = "".join(f"text {token} more{token}\n plain {token[2:4]}\n" for token in (EOS, BOS, TURN))
    ours = World(tmp_path).raw({"README.txt": control, "b.txt": text, "c.md": "no .txt"})
    first = World(tmp_path, data_dir=tmp_path / "first")
    folders = ["--input_dir", ours.raw_dir, "--model_id", ours.tokenizer, "--output_dir"]
    for shard_id in (0, 1):
        words = [SCRIPT, "--shard_id", shard_id, *folders, first.data_dir]
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        ours.main(flags[0], shard_id, *folders, ours.data_dir, *flags[1:]).ends(0)
    expected, found = dict(first.members()), dict(ours.members())
    assert list(found) == list(expected)
    assert len(found) > 20
    other = {name for name in found if found[name] != expected[name]}
    assert len(other) == (3 if flags == ["--shard_id"] else 0)
    assert all(name.endswith(".token_ids.json") for name in other)


def test_json_ids_are_written_like_json_dumps_for_ids_of_one_to_seven_digits(tmp_path: Path) -> None:
    for size in (10, 856, 128_256, 1_000_002):
        numbers = [n for n in (0, 9, 10, 99, 100, 9_999, 99_999, 100_000, 999_999, 10**6) if n < size - 2]
        words = Tokenizer(models.WordLevel({f"w{n}": n for n in [*numbers, size - 1]}, "w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        model = tmp_path / str(size)
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
        expected = [numbers, numbers[::-1], [size - 1], [0]]
        texts = "\n".join(" ".join(f"w{number}" for number in some) for some in expected)
        world = World(model, tokenizer=model).raw({"a.txt": texts}).plan(num_shards=1).run()
        ids = [data.decode() for name, data in world.members() if name.endswith(".json")]
        assert ids == [json.dumps(some) for some in expected]
