"""Tokenizers: what planning keeps of them gives the ids of transformers, and is what training loads."""

from __future__ import annotations

import importlib.metadata
import io
import json
import multiprocessing.util
import os
import random
import re
import shutil
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from loader import NotFound, get_llama3_dataloader
from tests import chat_tokenizers
from tests.checkout import ROOT
from tests.children import environ_of_children, run_child, shardprep
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer
from tests.world import BOS, EOS, World, flags_of, save_tokenizer

Change = Callable[[Path], Any]


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_bytes()) if path.exists() else {}
    path.write_text(json.dumps({**data, **changes}), encoding="utf-8")


def file_of(name: str, **values: Any) -> Change:
    return lambda folder: edit(folder / name, **values)


def config(**changes: Any) -> Change:
    return file_of("tokenizer_config.json", **changes)


def with_decoder(folder: Path) -> None:
    """As Llama 3 on the hub: all added tokens in the configuration, too, and a model's config beside it."""
    added = json.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
    decoder = {str(token.pop("id")): token for token in added}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=decoder, model_max_length=131072)
    edit(folder / "config.json", model_type="llama", transformers_version="4.40.0")
    edit(folder / "special_tokens_map.json", bos_token=BOS, eos_token=EOS)


def old_merges(folder: Path) -> None:
    """Merges as texts and no ignore_merges, as older versions of tokenizers wrote them."""
    model = json.loads((folder / "tokenizer.json").read_bytes())["model"]
    del model["ignore_merges"]
    edit(folder / "tokenizer.json", model={**model, "merges": [" ".join(pair) for pair in model["merges"]]})


def words(folder: Path) -> None:
    shutil.rmtree(folder)
    save_word_tokenizer(folder, 50)


PLAIN: dict[str, Change] = {
    "as it is": lambda folder: None,
    "as on the hub": with_decoder,
    "older merges": old_merges,
    "without a post-processor": file_of("tokenizer.json", post_processor=None),
    "words": words,
    "a chat template": config(chat_template="{{ messages }}"),
    "the class of transformers 5": config(tokenizer_class="TokenizersBackend", backend="tokenizers"),
}
TRUNCATION = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
FLAGS = {"lstrip": True, "normalized": False, "rstrip": False, "single_word": False, "special": True}
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
    "truncation": file_of("tokenizer.json", truncation=TRUNCATION),
    "no JSON": lambda folder: (folder / "tokenizer.json").write_text("{"),
    "a token of other flags": config(added_tokens_decoder={"281": {"content": BOS, **FLAGS}}),
}


def refuse_processes(patch: pytest.MonkeyPatch) -> None:
    """Planning reads a plain tokenizer by itself, and asks transformers in a process of its own for others.

    From here on none can be started.
    """

    def refuse(*_: Any) -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    patch.setattr(multiprocessing.util, "spawnv_passfds", refuse)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_processes(monkeypatch)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Some text, and a tokenizer of its own to change, of which no earlier plan kept anything."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = save_tokenizer(tmp_path / "model")
    return World(tmp_path, tokenizer=model).raw({"a.txt": "a <|end_of_text|> line\n도서관\n"})


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_tokenizer_is_read_without_transformers_and_equals_its(world: World, kind: str) -> None:
    PLAIN[kind](world.tokenizer)
    world.plan(num_shards=1)
    ours, theirs = world.data_dir / "tokenizer", world.data_dir / "theirs"
    for source in (world.tokenizer, ours):  # and so does training load it from the data set
        AutoTokenizer.from_pretrained(source).save_pretrained(theirs)
        assert (ours / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    tokenizer, told = AutoTokenizer.from_pretrained(ours), world.plan_json()["tokenizer"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert told[name] == getattr(tokenizer, name), "a token that no file names is not the word None"
    assert told["vocab_size"] == len(tokenizer)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_transformers_may_change_is_left_to_transformers(world: World, kind: str) -> None:
    NOT_PLAIN[kind](world.tokenizer)
    assert world.try_plan().code == 74, "there is no process for it"


@pytest.mark.usefixtures("no_process")
def test_another_major_version_of_transformers_is_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_name = importlib.metadata.distribution

    def distribution(name: str) -> Any:
        return SimpleNamespace(version="6.0.1") if name == "transformers" else of_name(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert world.try_plan().code == 74


@pytest.mark.processes
def test_a_second_plan_asks_transformers_no_more_and_a_damaged_cache_counts_as_none(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(mask_token="<|mask|>")(world.tokenizer)
    first = world.plan(num_shards=1).plan_json()
    with monkeypatch.context() as patch:
        refuse_processes(patch)
        again = World(tmp_path / "again", tokenizer=world.tokenizer, raw_dir=world.raw_dir)
        assert again.plan(num_shards=1).plan_json() == first
        for path in [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]:
            intact = path.read_bytes()
            path.write_bytes(intact[:9] + bytes([intact[9] ^ 1]) + intact[10:])
            assert again.try_plan(num_shards=1, output_dir=tmp_path / "damaged").code == 74, path
            path.write_bytes(intact)
        path.unlink()
        assert again.try_plan(num_shards=1, output_dir=tmp_path / "gone").code == 74
    anew = World(tmp_path / "anew", tokenizer=world.tokenizer, raw_dir=world.raw_dir)
    assert anew.plan(num_shards=1).plan_json() == first


# What is refused. ---------------------------------------------------------------------------------------

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import PreTrainedTokenizerFast
class StrangeTokenizer(PreTrainedTokenizerFast):
    pass
"""


def with_code(folder: Path) -> Path:
    """Make the tokenizer's class one of its own, whose code makes a file; returns that file."""
    marker = folder.with_name("marker")
    own = {"auto_map": {"AutoTokenizer": [None, "strange.StrangeTokenizer"]}}
    edit(folder / "tokenizer_config.json", tokenizer_class="StrangeTokenizer", **own)
    edit(folder / "config.json", model_type="strange", **own)
    (folder / "strange.py").write_text(CODE.format(marker=str(marker)))
    return marker


def dropout(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_bytes())["model"]
    edit(folder / "tokenizer.json", model={**model, "dropout": 0.1})


def slow(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    edit(folder / "config.json", model_type="t5")


def boxes(folder: Path) -> None:
    """LayoutLM's wants boxes beside its words; its tokenizer.json would give ids that it never gives."""
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a")
    vocab = {token: number for number, token in enumerate(names)}
    Tokenizer(models.WordPiece(vocab, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "LayoutLMv2Tokenizer", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0a" * 32 + "\nsize 12345\n"
# The exit code of plan, and what it names.
REFUSED: dict[str, tuple[Change, int, str]] = {
    "dropout": (dropout, 2, "model.dropout"),
    "a pointer": (lambda it: (it / "tokenizer.json").write_text(POINTER), 66, "git lfs pull"),
    "an empty folder": (lambda it: [path.unlink() for path in it.iterdir()], 66, "model"),
    "a slow one": (slow, 2, "ByT5Tokenizer"),
    "one that encodes no plain text": (boxes, 2, "LayoutLMv2Tokenizer"),
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", REFUSED)
def test_a_tokenizer_that_cannot_be_used_is_refused_by_name(world: World, kind: str) -> None:
    change, code, named = REFUSED[kind]
    change(world.tokenizer)
    ended = world.try_plan()
    told = named in ended.err and str(world.tokenizer) in ended.err
    assert (ended.code, told) == (code, True), ended.err
    assert not world.data_dir.exists()


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


CONTROL_TOKENS = ("<unk>", "<s>", "</s>")


def splitting(unknown: str, pattern: str) -> Tokenizer:
    vocab = {token: number for number, token in enumerate([*CONTROL_TOKENS, "hello"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    return tokenizer


FAILING = {
    "it raises for a word": splitting("[UNK]", " "),
    "its pattern gives up on the probe, in a panic of Rust": splitting("<unk>", "(a|aa)+$"),
    "its pattern gives up on a document": splitting("<unk>", "(z|zz)+$"),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_tokenizer_that_fails_on_a_text_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    model = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=FAILING[kind], **names).save_pretrained(model)
    world = World(tmp_path, tokenizer=model).raw({"a.txt": "hello " + "z" * 300 + "!\n"})
    ended = world.try_plan()
    assert (ended.code, str(model) in ended.err) == (65, True), ended.text
    assert not (world.data_dir / "plan.json").exists()


def test_a_damaged_tokenizer_json_ends_peek_by_its_name_and_report_goes_on(world: World) -> None:
    world.plan().run()
    path = world.data_dir / "tokenizer" / "tokenizer.json"
    for damaged in ("", "[]", '{"model": {', '{"added_tokens": [1], "model": {}}'):
        path.write_text(damaged)
        report = world.main("report", world.data_dir, json=True)
        assert (report.code, json.loads(report.out)["shards"]["num_done"]) == (0, 2)
        ended = world.main("peek", world.data_dir)
        assert (ended.code, str(path) in ended.err) == (74, True)


# What shards have, and what training loads. -------------------------------------------------------------


# A tokenizer by its name, and its class.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaTokenizer, legacy": ("Llama 2", {"tokenizer_class": "LlamaTokenizer", "legacy": True}),
    "the plain class": ("bytes", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "GPT2Tokenizer, with a space before": (
        "bytes", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "add_bos_token": True}
    ),
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_a_data_sets_tokenizer_loads_as_what_made_its_shards(tmp_path: Path, kind: str) -> None:
    name, values = KINDS[kind]
    model = chat_tokenizers.save_tokenizer(name, tmp_path / "model")
    edit(model / "tokenizer_config.json", **values, padding_side="left", model_max_length=77)
    rng, parts = random.Random(7), ["hello", " ", "moon", "<think>", "one", ",", "don't", "안녕", "바다"]
    parts += ["e\u0301", "ＡＢ", "½", "▁", "\u200b", " ", "hello wor", "한", "👩‍👧"]
    lines = sorted({"".join(rng.choices(parts, k=9)).strip() for _ in range(300)})
    world = World(tmp_path, tokenizer=model).raw({"a.txt": "\n".join(lines)})
    world.make(num_shards=1)
    expected = AutoTokenizer.from_pretrained(str(model))
    ids = expected(lines)["input_ids"]
    assert [(text, made) for _, text, made in world.documents()] == list(zip(lines, ids, strict=True))
    with world.loader(batch_size=2) as loader:
        loaded = loader.tokenizer
    for found in (loaded, AutoTokenizer.from_pretrained(str(world.data_dir / "tokenizer"))):
        assert found(lines)["input_ids"] == ids
        assert found.batch_decode(ids) == expected.batch_decode(ids)
        assert found.special_tokens_map == expected.special_tokens_map
        assert (found.padding_side, found.model_max_length) == ("left", 77)


@pytest.mark.processes
def test_a_model_with_several_chat_templates_is_planned_and_keeps_them(world: World) -> None:
    """transformers saves them as files of a folder of their own; a planned tokenizer has no folders."""
    templates = {"default": "{{ messages[0].content }}", "tools": "tools: {{ messages[0].content }}"}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(world.tokenizer)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(world.tokenizer)
    assert (world.tokenizer / "additional_chat_templates").is_dir()
    world.plan()
    assert PreTrainedTokenizerFast.from_pretrained(world.data_dir / "tokenizer").chat_template == templates


@pytest.mark.processes
def test_planning_never_imports_torch_and_its_process_no_transformers(world: World, tmp_path: Path) -> None:
    """Also where transformers is needed, which imports torch if it finds one."""
    config(mask_token="<|mask|>")(world.tokenizer)
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise ImportError('torch was imported')\n"
    )
    program = (
        "import sys; from shardprep.__main__ import main; code = main(sys.argv[1:]);"
        "print('loaded', *({'torch', 'transformers'} & set(sys.modules))); sys.exit(code)"
    )
    places = {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", program, "plan", *world.words_of_plan()]
    ended = run_child(command, env=environ_of_children(**places))
    assert ended.stdout.splitlines()[-1].split() == ["loaded"]
    assert not (tmp_path / "imported").exists()


# What documents begin and end with. ---------------------------------------------------------------------

LINES = ["Snow falls in winter.", "겨울에는 눈이 내립니다.", "Tea is ready after 4 minutes!"]
# Tokenizers by their names, and the ids that they put before and after a text.
FAMILIES: dict[str, tuple[list[int], list[int]]] = {
    "bytes": ([], []),  # as Qwen's
    "bytes, BOS": ([0], []),  # as Llama's
    "bytes, Roberta": ([0], [1]),
    "Bert, cased": ([0], [1]),
}


def told_ends(told: str) -> list[str]:
    """The tokens that a command says documents begin and end with."""
    (line,) = (line for line in told.splitlines() if "documents begin" in line)
    return re.findall(r"<\S+>", line)


@pytest.mark.parametrize("adds", [True, False], ids=["added", "bare"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_familys_documents_begin_and_end_as_told(tmp_path: Path, family: str, adds: bool) -> None:
    model = chat_tokenizers.save_tokenizer(family, tmp_path / "model")
    before, after = ([chat_tokenizers.SPECIAL[number] for number in ids if adds] for ids in FAMILIES[family])
    reference = AutoTokenizer.from_pretrained(model)
    expected = [reference.encode(line, add_special_tokens=adds) for line in LINES]
    world = World(tmp_path, tokenizer=model).raw({"a.txt": "\n".join(LINES)})
    assert told_ends(world.try_plan(num_shards=1, add_special_tokens=adds).text) == before + after
    assert [ids for _, _, ids in world.run(0).documents()] == expected
    assert told_ends(world.main("doctor", output_dir=world.data_dir).text) == before + after
    rows = World(tmp_path, tokenizer=model, data_dir=tmp_path / "rows")
    told = rows.try_plan(num_shards=1, add_special_tokens=adds, record="packed", seq_len=4096).text
    assert told_ends(told) == [*before, chat_tokenizers.EOT]
    end = reference.eos_token_id
    once = [token for ids in expected for token in (ids if ids[-1:] == [end] else [*ids, end])]
    assert rows.run(0).samples()[0]["input_ids"] == once


SOME = ["안녕", "words", "한", "more words", "글"]


@pytest.mark.parametrize("options", [{}, {"record": "packed", "seq_len": 8, "append_eos": False}], ids=str)
@pytest.mark.parametrize("texts", [SOME, SOME[::2], []], ids=["some", "all", "no documents"])
def test_documents_of_which_the_tokenizer_leaves_nothing_are_made_shown_and_reported_as_others(
    world: World, texts: list[str], options: dict[str, Any]
) -> None:
    """It drops all but ASCII, and puts nothing around it."""
    path = world.tokenizer / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Replace(Regex(r"[^\x20-\x7e]+"), "")
    tokenizer.save(str(path))
    (world.raw_dir / "a.txt").unlink()
    world.raw({"a.jsonl": [{"text": text} for text in texts]})
    world.plan(num_shards=1, add_special_tokens=False, **options).run()
    report = world.main("report", world.data_dir, json=True)
    assert (report.code, json.loads(report.out)["counts"]["num_documents"]) == (0, len(texts))
    assert world.main("report", world.data_dir, output=world.data_dir / "page.html").code == 0
    if texts and not options:
        shown = re.findall(r"^shard-.*: (\d+) ", world.main("peek", world.data_dir).out, re.MULTILINE)
        assert [int(size) > 0 for size in shown] == [text.isascii() for text in texts]
        for address in ("0:0", "a.jsonl:0"):
            assert world.main("peek", world.data_dir, address).code == 0


# On the hub, which is a local server here, or does not answer. ------------------------------------------

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """What ``huggingface_hub`` asks for of repositories, as files of a folder: revision, list, and files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.place, self.asked, self.is_down = (
            World(folder / "hub", raw_dir=folder / "hub"),
            list[str](),
            False,
        )

    def add(self, name: str, files: dict[str, bytes]) -> None:
        """Serve "models/NAME" or "datasets/NAME"."""
        listed = [{"type": "file", "path": path, "size": len(raw), "oid": SHA} for path, raw in files.items()]
        found = {"id": name.partition("/")[2], "sha": SHA, "siblings": []}
        self.place.raw(
            {f"api/{name}/revision/main": json.dumps(found), f"api/{name}/tree/{SHA}": json.dumps(listed)}
        )
        self.place.raw(
            {f"{name.removeprefix('models/')}/resolve/{SHA}/{path}": raw for path, raw in files.items()}
        )

    def environ(self, folder: Path) -> dict[str, str]:
        kept = {name: os.environ[name] for name in os.environ if not name.startswith(("HF_", "SLURM_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
        return {**kept, **hub, "PATH": path, "PYTHONPATH": str(ROOT)}


class Answers(SimpleHTTPRequestHandler):
    server: Hub

    def send_head(self) -> Any:
        self.server.asked.append(self.path)
        if not self.server.is_down:
            return super().send_head()
        self.close_connection = True
        return None

    def translate_path(self, path: str) -> str:
        return str(self.server.place.raw_dir / path.partition("?")[0].strip("/"))

    def end_headers(self) -> None:
        self.send_header("ETag", f'"{zlib.crc32(self.path.encode()):08x}"')
        self.send_header("X-Repo-Commit", SHA)
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def plan(hub: Hub, place: Path, *, code: int, **flags: object) -> str:
    """Plan in a process; returns what it prints."""
    done = run_child(shardprep("plan", *flags_of(flags)), cwd=place, env=hub.environ(place), code=code)
    return done.stdout + done.stderr


@pytest.mark.processes
def test_a_hub_that_does_not_answer_is_asked_for_a_model_once(hub: Hub, world: World, tmp_path: Path) -> None:
    hub.is_down = True
    said = plan(hub, tmp_path, code=66, input_dir=world.raw_dir, output_dir="data", model_id="some/model")
    assert "hf download some/model " in said
    assert sum("some/model" in path for path in hub.asked) == 1


@pytest.mark.processes
def test_a_model_of_the_hub_is_fetched_once_and_later_found(hub: Hub, world: World, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in world.tokenizer.iterdir()}
    hub.add("models/some/model", {**files, "vocab.txt": b"", "model.safetensors": b"not fetched"})
    flags = {"input_dir": world.raw_dir, "model_id": "some/model"}
    plan(hub, tmp_path, code=0, output_dir="first", **flags)
    assert not any("safetensors" in path for path in hub.asked)
    hub.is_down, num_asked = True, len(hub.asked)
    for name in ("whole", "as transformers leaves it, without what it did not ask for"):
        plan(hub, tmp_path, code=0, output_dir=name, **flags)
        for path in tmp_path.glob("hf/hub/*/snapshots/*/vocab.txt"):
            path.unlink()
    assert len(hub.asked) - num_asked <= 4, "and nobody waits for one that does not answer"
    plans = [json.loads(path.read_bytes())["plan_id"] for path in tmp_path.glob("*/plan.json")]
    assert len(plans) == 3
    assert len(set(plans)) == 1


@pytest.mark.processes
def test_a_data_set_of_the_hub_is_told_how_to_be_fetched(hub: Hub, world: World, tmp_path: Path) -> None:
    lines = b"".join(b'{"input": "question %d", "output": "answer"}\n' % number for number in range(20))
    hub.add("datasets/some/questions", {"README.md": b"# card", "data/train.jsonl": lines})
    model = tmp_path / "model of mine"
    model.symlink_to(world.tokenizer)
    flags = {"output_dir": "data", "model_id": model, "text_template": r"{input}\n\n{output}"}
    said = plan(hub, tmp_path, code=66, input_dir="some/questions", **flags)
    found = re.search(r"(hf download .* --local-dir RAW); then plan --input_dir RAW --recursive", said)
    assert found
    run_child(["bash", "-euc", found[1]], cwd=tmp_path, env=hub.environ(tmp_path))
    plan(hub, tmp_path, code=0, input_dir="RAW/data", **flags)
    assert world.inputs() == ["train.jsonl"]


def test_other_names_of_folders_are_no_data_sets_of_the_hub(world: World) -> None:
    for name in ("raw", "/lustre/raw", "a/b/c", "../a"):
        ended = world.try_plan(input_dir=name)
        assert (ended.code, "hf download" in ended.text) == (66, False)
