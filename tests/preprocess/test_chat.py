"""``--record chat``: ids and loss masks equal those of transformers, and invalid conversations are left out.

By default a few tokenizers and templates are tested. ``CHAT_MASKS=all`` (``make torture``) tests 40
tokenizers x 12 templates x 200 conversations, and Llama 3's tokenizer if it is available.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from transformers import AutoTokenizer

from tests import chat_sets
from tests.chat_sets import PLAIN, TAGGED, conversations
from tests.children import child, environ_of_children, is_living, shardprep
from tests.input_writers import table_bytes
from tests.oracle.test_done import forge, with_field
from tests.waiting import wait_until
from tests.world import World, save_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.processes]  # conversations are rendered in a process

CHATS = conversations(40)
PLACE = Path(__file__).parents[1] / "held"


def world_of(folder: Path, template: str, chats: list[Any], lines: Sequence[str] = ()) -> World:
    """Return a world of conversations, then JSON ``lines``, with a tokenizer that has this chat template."""
    records = [json.dumps({"messages": chat}, ensure_ascii=False) for chat in chats]
    world = World(folder, tokenizer=save_tokenizer(folder / "model", template))
    return world.raw({"chats.jsonl": "\n".join([*records, *lines]) + "\n"})


def planned(world: World, **options: Any) -> World:
    return world.plan(**{"record": "chat", "seq_len": 64, "num_shards": 1, "max_bad_fraction": 1, **options})


def flat_of(world: World) -> list[tuple[int, int]]:
    """Return all (id, label) that the loader delivers."""
    return [pair for each in world.samples() for pair in zip(each["input_ids"], each["labels"], strict=True)]


def flat(pairs: list[tuple[list[int], list[int]]]) -> list[tuple[int, int]]:
    """Convert (ids, mask) of conversations to (id, label) of all tokens."""
    tokens = [token for ids, mask in pairs for token in zip(ids, mask, strict=True)]
    return [(token, token if is_set else -100) for token, is_set in tokens]


def reasons(world: World) -> dict[int, str]:
    """Return line -> reason of all records that were left out."""
    return {entry["line"]: entry["reason"] for entry in world.lines("quarantine")}


TAKES_ALL = os.environ.get("CHAT_MASKS") == "all"
NUM_CHATS = 200 if TAKES_ALL else 25
# Most of these once had masks that differed from transformers'.
SAMPLE = [
    ("bytes, alphabet alone", "content"), ("bytes, NFC", "content"), ("words, NFC", "begins with blanks"),
    ("Metaspace", "inside words"), ("bytes, alphabet alone", "without tags"),
    ("bytes, stripped", "whole turn"), ("Llama 2, NFC", "several blocks"), ("Bert", "empty blocks"),
    ("Unigram", "trimmed"), ("bytes, trimmed, space in front", "reasoning"),
    ("WordPiece, no accents", "in a variable"), ("bytes, trimmed, space in front", "without tags"),
    ("words, no pre-tokenizer", "without tags, ChatML"),
]  # fmt: skip
NAMES = [*chat_sets.TOKENIZERS, "Llama 3"]
PAIRS = [(name, each) for name in NAMES for each in chat_sets.TEMPLATES] if TAKES_ALL else SAMPLE


def expected_of(tokenizer: Any, chat: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Return ids and mask by transformers; for a template without tags, by the characters of each token."""
    if "endgeneration" in tokenizer.chat_template:
        found = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        return found["input_ids"], found["assistant_masks"]
    written = set[int]()  # places of the assistant's characters: what rendering its message adds
    for number, message in enumerate(chat):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(chat[:number], tokenize=False, add_generation_prompt=True)
            with_it = tokenizer.apply_chat_template(chat[: number + 1], tokenize=False)
            written |= {*range(len(before), len(with_it))}
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = []
    for begin, end in found["offset_mapping"]:
        if begin < end:
            mask.append(int(not written.isdisjoint(range(begin, end))))
        else:  # a space whose offsets were trimmed is between two characters
            mask.append(int(begin - 1 in written and begin in written))
    return found["input_ids"], mask


def expected(model: Path, chats: list[Any]) -> list[tuple[list[int], list[int]]]:
    """Return ids and mask of each conversation."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [expected_of(tokenizer, chat) for chat in chats]


@pytest.mark.parametrize(("name", "template"), PAIRS)
def test_masks_equal_those_of_transformers(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, template: str
) -> None:
    chats = chat_sets.odd_conversations(NUM_CHATS, seed=PAIRS.index((name, template)))
    if name == "Llama 3":
        model = Path(request.getfixturevalue("shared_dir")) / "tokenizers" / "llama3"
    else:
        model = chat_sets.save_tokenizer(name, tmp_path / "model")
    world = World(tmp_path, tokenizer=model)
    world.raw({"chats.jsonl": [{"messages": chat} for chat in chats]})
    tokenizer: Any = AutoTokenizer.from_pretrained(world.tokenizer)
    tokenizer.chat_template = chat_sets.TEMPLATES[template]
    (tmp_path / "template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    file = tmp_path / "template.jinja"
    planned(world, chat_template_file=file, allow_special_tokens=True, seq_len=512).run()
    pairs, left_out = [], reasons(world)
    for number, chat in enumerate(chats):
        if number in left_out:
            answers = [message["content"].strip() for message in chat if message["role"] == "assistant"]
            assert not any(answers), (number, chat)
        else:
            pairs.append(expected_of(tokenizer, chat))
    assert flat_of(world) == flat(pairs)
    assert sum(map(sum, (mask for _, mask in pairs))) > NUM_CHATS
    assert len(left_out) < NUM_CHATS / 2
    shutil.rmtree(tmp_path)


def test_best_fit_keeps_conversations_whole_and_peek_marks_tokens_with_labels(tmp_path: Path) -> None:
    """An export, which would lose the labels, is refused."""
    world = planned(world_of(tmp_path, PLAIN, CHATS), pack="best_fit", seq_len=512, num_shards=2).run()
    found = []
    for row in world.samples(boundaries=["segment_ids", "position_ids"]):
        begins = [place for place, position in enumerate(row["position_ids"]) if position == 0]
        for begin, end in zip(begins, [*begins[1:], len(row["input_ids"])], strict=True):
            found.append(row["input_ids"][begin:end])
    wanted = [ids for ids, _ in expected(world.tokenizer, CHATS)]
    assert max(map(len, wanted)) <= 512, "each fits into a row"
    assert sorted(ids for ids in found if len(ids) > 1 and ids[0] != ids[-1]) == sorted(wanted)
    shown = world.main("peek", world.data_dir, num=99, chars=0).out.replace("\n  ", "\n")
    turns = [turn for chat in CHATS for turn in chat]
    for turn in (turn for turn in turns if turn["role"] == "assistant"):
        assert f"⟪{turn['content']}⟦<|eot_id|>⟧⟫" in shown
    assert any(f"⟪{turn['content']}" not in shown for turn in turns if turn["role"] == "user")
    world.main("export", world.data_dir, to="nanogpt", output_dir=tmp_path / "out").ends(2)


def test_conversations_in_tables_equal_those_in_json_lines(tmp_path: Path) -> None:
    """Messages may be JSON: datasets 5 has lists of JSON, DuckDB a column of JSON or strings.

    Text that is not UTF-8 leaves out only its conversation.
    """
    chats = CHATS[:12]
    whole = pyarrow.array([json.dumps(chat) for chat in chats])
    each = pyarrow.array([[json.dumps(message) for message in chat] for chat in chats])
    contents = [message["content"] for chat in chats for message in chat]
    role = pyarrow.array([message["role"] for chat in chats for message in chat])

    def messages(content: Any) -> Any:
        return pyarrow.ListArray.from_arrays(
            each.offsets, pyarrow.StructArray.from_arrays([role, content], ["role", "content"])
        )

    tables = {"rows": pyarrow.array(chats), "strings": whole, "lists of strings": each}
    tables["dictionary"] = whole.dictionary_encode()
    if hasattr(pyarrow, "json_"):  # pyarrow 19
        as_json = functools.partial(pyarrow.ExtensionArray.from_storage, pyarrow.json_(pyarrow.string()))
        tables["JSON"] = as_json(whole)
        tables["lists of JSON"] = pyarrow.ListArray.from_arrays(each.offsets, as_json(each.values))
        tables["JSON in messages"] = messages(as_json(pyarrow.array(map(json.dumps, contents))))
    world = world_of(tmp_path, TAGGED, chats)
    for name, column in tables.items():
        world.raw({f"{name}.parquet": table_bytes({"messages": column}, "parquet", rows=5)})
    world.raw({"strings.jsonl": [{"messages": text} for text in whole.to_pylist()]})
    bad: list[bytes] = [content.encode() for content in contents]
    bad[each.offsets[3].as_py()] = b"\xff, which is no UTF-8"
    texts = pyarrow.Array.from_buffers(pyarrow.string(), len(bad), pyarrow.array(bad).buffers())
    world.raw({"z.arrow": table_bytes({"messages": messages(texts)}, "stream", rows=12)})
    planned(world).run()
    told = [(line["reason"], line["input"], line["input_offset"]) for line in world.lines("quarantine")]
    assert told == [("undecodable", "z.arrow", 3)]
    pairs = expected(world.tokenizer, chats)
    assert flat_of(world) == flat(pairs * (2 + len(tables)) + pairs[:3] + pairs[4:])


def test_equal_conversations_are_on_the_same_side_of_a_split(tmp_path: Path) -> None:
    """Even if the order of keys differs, or a key is null."""
    chats = conversations(150)
    turned = [[{"name": None, **dict(reversed(turn.items()))} for turn in chat] for chat in chats]
    world = world_of(tmp_path, PLAIN, chats + turned)
    planned(world, num_shards=9, validation_fraction=0.2, max_bad_fraction=0).run()
    texts = [json.dumps(chat, ensure_ascii=False, sort_keys=True, separators=(",", ":")) for chat in chats]
    digests = [hashlib.sha256(text.encode()).digest()[:16] for text in texts]
    assert sorted(world.digests()) == sorted(digests * 2)
    num_held = sum(int.from_bytes(digest[:8], "big") < 0.2 * 2**64 for digest in digests)
    validation = [manifest["counts"]["validation"]["num_documents"] for manifest in world.manifests()]
    assert sum(validation) == 2 * num_held > 20


STRICT = TAGGED.replace(
    "{{ bos_token }}{% for m in messages %}",
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['content'] is not defined %}{{ raise_exception('no content') }}{% endif %}",
)
ASK = {"role": "user", "content": "hi"}
BAD: dict[str, tuple[str, str]] = {
    "no messages": ("[]", "no_messages"),
    "a missing field": ("null", "null_field"),
    "messages as a text": ('"user: hi"', "wrong_type"),
    "a message that is no object": ('["hi"]', "wrong_role"),
    "a role of no template": ('[{"role": "poet", "content": "hi"}]', "wrong_role"),
    "a question without an answer": (json.dumps([ASK]), "no_assistant"),
    "a message without a content": (
        json.dumps([ASK, {"role": "assistant", "content": None}]), "template_error"
    ),
    "a control token": (
        json.dumps([{**ASK, "content": "a<|eot_id|>b"}, {"role": "assistant", "content": "no"}]),
        "control_token",
    ),
    "a key twice": ('[{"role": "user", "content": "a", "con\\u0074ent": "b"}]', "bad_json"),
    "a key twice, deep": ('[{"role": "user", "call": {"x": {"y": 1, "y": 2}}}]', "bad_json"),
    "messages twice": ('[], "messages": [{"role": "user", "content": "a"}]', "bad_json"),
    "a number too large": ('[{"role": "user", "content": "a", "x": 1E400}]', "bad_json"),
    **{
        f"{510 + 2} levels of {opening}": (
            f'[{{"role": "user", "content": "a", "x": {opening * 510}1{closing * 510}}}]', "bad_json"
        )
        for opening, closing in (("[", "]"), ('{"a":', "}"))
    },
}  # fmt: skip


def test_an_invalid_conversation_is_left_out_with_its_reason(tmp_path: Path) -> None:
    lines = [f'{{"messages": {messages}}}' for messages, _ in BAD.values()]
    lines.append(json.dumps({"messages": CHATS[1]}))
    world = planned(world_of(tmp_path, STRICT, CHATS[:1], lines)).run().verify(deep=1)
    names = dict(enumerate(BAD, start=1))
    assert {names[line]: reason for line, reason in reasons(world).items()} == {
        name: reason for name, (_, reason) in BAD.items()
    }
    (detail,) = (each["detail"] for each in world.lines("quarantine") if each["reason"] == "template_error")
    assert "no content" in detail, "the template's own message"
    assert flat_of(world) == flat(expected(world.tokenizer, CHATS[:2]))


NUMBERS = ["18446744073709551616", "-9223372036854775809", "1.0", "-0", "-0.0", "1e5"]
NUMBERS.append("1.7976931348623157e308")


def test_numbers_and_nested_values_are_rendered_as_json_loads_reads_them(tmp_path: Path) -> None:
    template = TAGGED.replace("{{ m['content'] }}", "{{ m['content'] }}{{ (m['call'] or 0) | tojson }}")
    deep = "[" * 508 + "1" + "]" * 508
    answer = '{"role": "assistant", "content": "b", "call": {"x": %s}}'
    lines = [f'{{"messages": [{json.dumps(ASK)}, {answer % value}]}}' for value in (*NUMBERS, deep)]
    world = planned(world_of(tmp_path, template, [], lines), seq_len=4096).run()
    assert reasons(world) == {}
    shown = world.main("peek", world.data_dir, num=99, chars=0).out
    for number in NUMBERS:
        assert json.dumps({"x": json.loads(number)}) in shown
    assert "[" * 500 in shown


FORGETS = PLAIN.replace(
    "{{ m['content'] }}", "{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}"
)


COUNTS = "{{ messages|length }} turns: " + PLAIN


@pytest.mark.parametrize("template", [FORGETS, COUNTS], ids=["forgets answers", "counts turns"])
def test_a_template_without_tags_may_change_earlier_turns(tmp_path: Path, template: str) -> None:
    """No conversation is left out, and labels are on the answers that the template shows."""
    world = planned(world_of(tmp_path, template, CHATS), seq_len=4096).run()
    assert reasons(world) == {}
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    pairs = flat_of(world)
    rendered: list[Any] = [tokenizer.apply_chat_template(chat) for chat in CHATS]
    assert [token for token, _ in pairs] == [token for each in rendered for token in each["input_ids"]]
    learnt = tokenizer.decode([label for _, label in pairs if label != -100])
    answers = []
    for chat in CHATS:
        for turn in chat:
            if turn["role"] == "assistant":
                is_shown = template is COUNTS or turn is chat[-1]
                answers.append(turn["content"] + "<|eot_id|>" if is_shown else "")
    assert learnt == "".join(answers)


TURN = "{% for m in messages %}{{ m['role'] }}: "
CALLS = "{% for call in m.tool_calls or [] %}{{ call.function }}{% endfor %}"
# Like Qwen3's: earlier answers lose their reasoning, and the last one always has some.
STRIPPING = (
    TURN + "{% if m['role'] != 'assistant' %}{{ m['content'] }}{% elif not loop.last %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% elif '</think>' in m['content'] %}"
    "{{ m['content'] }}{% else %}<think>\n\n</think>\n\n{{ m['content'] }}{% endif %}"
    + CALLS
    + "<|eot_id|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# Like Mistral's: roles must alternate, and there is no system message.
ALTERNATING = TURN + (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{{ m['content'] }}<|eot_id|>{% endfor %}"
)
ENDS_TURNS = TAGGED.replace(
    "{% generation %}{{ m['content'] }}",
    "{% generation %}{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}",
)
# Template -> what plan's warning quotes, or nothing without a warning.
WARNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Qwen3's changes earlier turns": (STRIPPING, ("--learn each", "'A probe.", "'<think>")),
    "one with tags leaves out reasoning of earlier turns": (ENDS_TURNS, ("--learn each", "'<think>")),
    "Llama 3's": (PLAIN, ()),
    "Mistral's refuses roles": (ALTERNATING, ("roles must alternate",)),
    "one that shows tool calls": (PLAIN.replace("<|eot_id|>", CALLS + "<|eot_id|>"), ()),
    "one that loses tool calls": (
        PLAIN.replace("<|eot_id|>", "{% if m.tool_calls %}a tool{% endif %}<|eot_id|>"), ("'probe_tool'",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNS)
def test_plan_warns_of_what_a_template_cannot_render_or_leaves_out(tmp_path: Path, name: str) -> None:
    template, quoted = WARNS[name]
    ended = world_of(tmp_path, template, [CHATS[0][-2:]]).try_plan(record="chat").ends(0)
    warnings = [line for line in ended.text.splitlines() if line.startswith("warning: the chat template")]
    assert bool(warnings) == bool(quoted)
    assert all(words in warnings[0] for words in quoted)


def test_a_template_with_todays_date_gives_equal_bytes_on_any_day(tmp_path: Path) -> None:
    world = planned(world_of(tmp_path, "{{ strftime_now('%d %b %Y') }}\n" + TAGGED, CHATS)).run()
    assert "26 Jul 2024" in world.main("peek", world.data_dir, num=1).out


def test_a_template_may_come_from_a_file_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    own = planned(world_of(tmp_path / "own", TAGGED, CHATS)).run()
    (tmp_path / "tagged.jinja").write_text(TAGGED, encoding="utf-8")
    world = World(tmp_path, raw_dir=own.raw_dir)
    planned(world, chat_template_file=tmp_path / "tagged.jinja").run()
    assert world.members() == own.members()
    own.try_plan(num_shards=1, record="chat", seq_len=64).ends(0)
    (own.tokenizer / "chat_template.jinja").write_text(TAGGED + " ", encoding="utf-8")
    own.try_plan(num_shards=1, record="chat", seq_len=64).ends(78)
    kept = own.data_dir / "tokenizer" / "chat_template.jinja"
    kept.write_text(TAGGED + " ", encoding="utf-8")
    (own.data_dir / "shard-00000.json").unlink()
    own.try_shard(0).ends(78, kept)
    own.try_plan(record="chat", add_special_tokens=False, output_dir=tmp_path / "n").ends(2)


def test_another_version_of_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = planned(world_of(tmp_path, TAGGED, CHATS))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: SimpleNamespace(version="9.0"))
    world.try_shard(0).ends(78, "transformers 9.0")


@pytest.mark.parametrize(("template", "most"), [(PLAIN, 700), (TAGGED, 8000)], ids=["plain", "tagged"])
def test_conversations_with_too_many_answers_are_left_out(tmp_path: Path, template: str, most: int) -> None:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    chats = [turns * (most // 10), turns * (most + most // 20), turns * (most * 2)]
    world = planned(world_of(tmp_path, template, chats)).run()
    assert reasons(world) == {1: "too_many_answers", 2: "too_many_answers"}
    assert f"{most + most // 20} answers" in world.lines("quarantine")[0]["detail"]
    num_labels = sum(label != -100 for _, label in flat_of(world))
    assert num_labels == 2 * (most // 10), "each answer and the end of its turn"


def renderers(parent: int | None = None) -> list[int]:
    """Return the ids of the processes that render conversations for a process (default: this one)."""
    found = []
    for path in Path(f"/proc/{parent or os.getpid()}/task").glob("*/children"):
        found += [int(pid) for pid in path.read_text().split()]
    return [pid for pid in found if b"chat" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_killed_renderer_is_an_error_and_the_next_attempt_starts_a_new_one(tmp_path: Path) -> None:
    world = planned(world_of(tmp_path, TAGGED, CHATS))
    (pid,) = renderers()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not renderers())
    assert world.try_shard(0).code == 74
    assert not world.contents()
    assert not world.temporaries()
    world.run()
    assert flat_of(world) == flat(expected(world.tokenizer, CHATS))


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
COSTLY = [  # an endless loop, a huge text for some conversations, a long text
    ENDLESS, "{% if messages|length > 2 %}{{ 'a' * 3000000000 }}{% endif %}", "{{ 'a' * 90000000 }}",
]  # fmt: skip


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Reduces the renderer's CPU time limit to 0.3 s, by the sitecustomize of tests/held."""
    monkeypatch.setenv("PYTHONPATH", str(PLACE))
    monkeypatch.setenv("MOST_CPU_S", "0.3")
    for pid in renderers():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not renderers())
    world_of(tmp_path / "dead", TAGGED, CHATS[:1]).try_plan(record="chat")  # notices the dead renderer


@pytest.mark.usefixtures("quick_limits")
def test_a_template_or_conversation_that_takes_too_long_is_named(tmp_path: Path) -> None:
    for number, more in enumerate(COSTLY):
        ended = world_of(tmp_path / str(number), PLAIN + more, CHATS).try_plan(record="chat")
        assert ended.code in (2, 65), more
        assert "--chat_template_file" in ended.err, more
    template = TAGGED + "{% if 'for ever' in messages[0]['content'] %}" + ENDLESS + "{% endif %}"
    costly = [{"role": "user", "content": "for ever"}, {"role": "assistant", "content": "no"}]
    world = world_of(tmp_path, template, [CHATS[0], costly, CHATS[1]])
    offset = len((world.raw_dir / "chats.jsonl").read_bytes().splitlines(keepends=True)[0])
    ended = world.try_plan(record="chat")
    assert ended.code == 65, "leaving it out would depend on the speed of the node"
    assert re.search(rf"chats\.jsonl byte {offset}\b", ended.err)


def test_a_killed_command_leaves_no_renderer_behind(tmp_path: Path) -> None:
    world = world_of(tmp_path, PLAIN + ENDLESS, CHATS)
    command = shardprep("plan", *world.words_of_plan(), "--record", "chat")
    environ = environ_of_children(PYTHONPATH=str(PLACE), MOST_CPU_S="99999")  # no limit ends it
    with child(command, env=environ) as process:

        def is_rendering() -> bool:
            assert process.poll() is None, "it ended before it could be killed"
            limits = [Path(f"/proc/{pid}/limits").read_text() for pid in renderers(process.pid)]
            return any(re.search(r"Max cpu time +\d", text) for text in limits)

        wait_until(is_rendering)  # the renderer sets its CPU time limit before it runs a template
        (renderer,) = renderers(process.pid)
        process.kill()
        wait_until(lambda: not is_living(renderer))


def test_verify_finds_a_mask_offset_outside_the_tar(tmp_path: Path) -> None:
    world = planned(world_of(tmp_path, TAGGED, CHATS)).run()
    forge(world, "records", with_field("mask_offset", lambda _: 10**9, row=1), shard_id=0)
    world.main("verify", world.data_dir).ends(65, "sample 1")
