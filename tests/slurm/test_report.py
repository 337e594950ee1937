"""``shardprep report``: what it says of a data set as a page and as JSON, and what it never says."""

from __future__ import annotations

import html
import json
import math
import os
import random
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.children import run_child
from tests.forged import seal
from tests.slurm.fake_slurm import Desk, ended
from tests.world import World, call_main, hostile_text, save_tokenizer

NAMES = ("뉴스 <b>굵게", "code", "웹문서")
SECRET = "https://user:hunter2@host/?api_token=abc"
NODE = '"><img src=x onerror="alert(1)'


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Four packed shards of three sources, with documents left out, and markup in names. Read only."""
    folder = tmp_path_factory.mktemp("report")
    files: dict[str, Any] = {f"{name}/글.txt": hostile_text(150) for name in NAMES}
    files |= {"code/bad.txt": b"good\n\xff\xfe\ncaf\xe9 again\n", "LICENSE.txt": "a\n", "<script>.log": "a\n"}
    world = World(folder, data_dir=folder / "자료 <i>").raw(files)
    world.make(num_shards=4, recursive=True, record="packed", seq_len=64, max_bad_fraction=0.9)
    path = world.data_dir / "shard-00001.json"
    manifest = json.loads(path.read_text())
    manifest["run"] |= {"host": NODE, "engine": f"<b>fast|tokens{{x}}</b> {SECRET} \x1b[31m"}
    path.write_text(json.dumps(manifest))
    seal(path)
    return world


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call_main("report", folder, "--json").out)
    return found


def page(folder: Path, place: Path) -> tuple[str, list[str], str]:
    """Return the source of a page, its tags, and the text between them."""
    assert call_main("report", folder, "--output", place / "page.html").code == 0
    source = (place / "page.html").read_text(encoding="utf-8")
    return source, re.findall("<[^>]*>", source), html.unescape(re.sub("<[^>]*>", "", source))


def test_the_numbers_are_the_sums_of_the_manifests(world: World) -> None:
    found = report(world.data_dir)
    for name in ("num_samples", "num_documents", "num_tokens", "num_pad_tokens", "input_bytes"):
        assert found["counts"][name] == sum(each["counts"][name] for each in world.manifests()), name
    whole, *sources = found["sources"]
    assert {each["name"] for each in sources} == set(NAMES)
    assert whole["num_tokens"] == sum(each["num_tokens"] for each in sources) == found["counts"]["num_tokens"]
    of_status = json.loads(call_main("status", world.data_dir, "--json").out)
    assert of_status["num_tokens"] == whole["num_tokens"]
    for each in sources:
        counts = of_status["sources"][each["name"]]
        assert counts["num_tokens"] == each["num_tokens"]
        files = (world.raw_dir / each["name"]).iterdir()
        assert counts["num_bytes"] == sum(path.stat().st_size for path in files)
    assert found["tar_bytes"] == sum(path.stat().st_size for path in world.data_dir.glob("*.tar"))
    assert found["left_out"] == {"undecodable": 2}
    assert sorted(found["plan"]["inputs_left_out"].values()) == [["<script>.log"], ["LICENSE.txt"]]
    assert (found["shards"]["verified"], found["shards"]["done"]) == (True, "0-3")


def test_a_recount_of_the_texts_gives_the_lengths_of_the_report(tmp_path: Path) -> None:
    """A letter is a token of the world's tokenizer, and BOS stands before each document."""
    chooser = random.Random(7)
    lengths = [1 + int(chooser.paretovariate(0.8)) % 900 for _ in range(400)]
    world = World(tmp_path).raw({"a.txt": "\n".join("Q" * length for length in lengths)})
    (whole,) = report(world.plan(num_shards=3).run().data_dir)["sources"]
    num_tokens = [length + 1 for length in lengths]
    assert (whole["num_tokens"], whole["text_bytes"]) == (sum(num_tokens), sum(lengths))
    assert whole["bytes_per_token"] == round(sum(lengths) / sum(num_tokens), 3)
    for percent in (50, 90, 99):
        exact = sorted(num_tokens)[math.ceil(len(lengths) * percent / 100) - 1]
        assert exact <= whole[f"length_p{percent}"] <= exact * 1.125


def test_markup_stays_text_no_secret_is_told_and_nothing_runs(world: World, tmp_path: Path) -> None:
    source, tags, shown = page(world.data_dir, tmp_path)
    elements = Counter(re.findall(r"<(\w+)", source))
    assert not elements.keys() & {"script", "i", "img", "iframe", "link", "object", "svg"}
    assert elements["b"] == 5, "the tiles' own"
    for text in (NAMES[0], NODE, "<b>fast|tokens{x}</b>", "<script>.log"):
        assert text in shown, "it is shown as it is"
    attributes = set(re.findall(r'([\w-]+)="', "".join(tags)))
    assert attributes == {"lang", "charset", "http-equiv", "content", "name", "class", "data-name"}
    assert "default-src 'none'" in source
    assert not re.search(r"url\(|@import", source)
    for form in (call_main("report", world.data_dir, "--json").out, source):
        assert "***@host" in form
        assert not re.search("hunter2|api_token=abc|\x1b", form)


@pytest.mark.processes
def test_an_unfinished_data_set_has_a_report_with_causes(desk: Desk) -> None:
    (desk.place / "away").touch()
    desk.submitted()
    desk.record("1_1", ended(75, stopped_by="OUT_OF_MEMORY"))
    found = report(desk.data)
    assert (found["shards"]["missing"], found["shards"]["num_done"]) == ("0-4", 0)
    assert found["shards"]["failed"] == {"OUT_OF_MEMORY": "1"}
    assert found["slurm_away"]
    assert "OUT_OF_MEMORY" in page(desk.data, desk.tmp)[2]


@pytest.mark.processes
def test_each_manifest_is_read_once_and_no_shard_nor_slurm(desk: Desk, world: World) -> None:
    opened, open_ = list[str](), os.open
    desk.patch.setattr(os, "open", lambda path, *rest: opened.append(str(path)) or open_(path, *rest))
    before = sorted(world.data_dir.rglob("*"))
    desk.patch.chdir(desk.tmp)
    assert call_main("report", world.data_dir).code == 0
    assert (desk.tmp / "report.html").is_file()
    assert sorted(world.data_dir.rglob("*")) == before, "nothing is written into the data set"
    of_shards = [name for name in opened if "/shard-" in name]
    assert sorted(of_shards) == sorted(map(str, world.data_dir.glob("shard-*.json")))
    assert [desk.calls(name) for name in ("squeue", "scontrol")] == [[], []]
    assert call_main("report", world.data_dir, "--output", desk.tmp / "none" / "x.html").code == 73


TEMPLATE = "{% for m in messages %}<|start_header_id|>{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}"
OPTIONS: list[dict[str, Any]] = [
    {"num_shards": 3, "keep_text": False, "append_eos": True, "token_format": "npy", "hash_inputs": True},
    {"shard_bytes": "4k", "also": "*.md", "allow_special_tokens": True, "max_bad_fraction": 0.5},
    {"limit": 20, "digests": True, "record": "packed", "seq_len": 64, "pack": "best_fit"},
    {"record": "chat", "seq_len": 64, "validation_fraction": 0.1},  # with the tokenizer's template
    {"record": "chat", "seq_len": 64, "chat_template_file": "own.jinja"},
]


@pytest.mark.processes
@pytest.mark.parametrize("options", OPTIONS)
def test_the_commands_that_are_told_make_the_same_plan_again_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Paths were given relative to another folder."""
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
    is_chat, has_own = options.get("record") == "chat", "chat_template_file" in options
    ending, text = ("jsonl", [{"messages": turns}] * 40) if is_chat else ("txt", hostile_text(60))
    place = tmp_path / "my work"
    save_tokenizer(place / "tokenizer", None if has_own else TEMPLATE)
    world = World(place).raw({f"a.{ending}": text, f"b.{ending}": text, "more.md": ""})
    (place / "own.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(place)
    folders = {"input_dir": "raw", "output_dir": "data", "model_id": "tokenizer"}
    planned = world.main("plan", **folders, **options)
    assert planned.code == 0, planned.text
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for line in report(world.data_dir)["again"]["commands"][:-2]:  # before run and verify
        words = shlex.split(line)
        if words[0] == "shardprep":
            again = call_main(*words[1:])
            assert again.code == 0, again.text
        else:
            run_child(words, cwd=elsewhere)
    ids = [World(tmp_path, data_dir=it).plan_json()["plan_id"] for it in (elsewhere / "NEW", world.data_dir)]
    assert ids[0] == ids[1]
