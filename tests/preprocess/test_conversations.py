"""Conversations with tools, thoughts and weights, in the forms that people's records have.

What is expected comes from ``apply_chat_template`` of transformers, for templates with generation tags its
mask, too. By default a few families of models are tested; ``CHAT_MASKS=all`` (``make torture``) tests all.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from tests.chat_families import CONTROL, FAMILIES, RECORDS, TOOLS, tagged, untagged
from tests.input_writers import table_bytes
from tests.world import World, save_tokenizer

pytestmark = pytest.mark.processes  # conversations are rendered in a process

TAKES_ALL = os.environ.get("CHAT_MASKS") == "all"
FAMILY_NAMES = list(FAMILIES) if TAKES_ALL else ["Qwen 3", "gpt-oss", "GLM", "DeepSeek R1", "Mistral"]
Pairs = list[tuple[int, int]]  # (id, label) of each token


def world_of(folder: Path, family: str, records: list[Any], suffix: str = "jsonl") -> World:
    """Return a world of these records, with a tokenizer that has a family's template and control tokens."""
    model = save_tokenizer(folder / "model", untagged(FAMILIES[family]))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    tokenizer.save(str(model / "tokenizer.json"))
    world = World(folder, tokenizer=model)
    if suffix == "jsonl":
        return world.raw({"chats.jsonl": records})
    names = {name for record in records for name in record}
    columns = {name: [record.get(name) for record in records] for name in names}
    return world.raw({"chats.parquet": table_bytes(columns, "parquet")})


def planned(world: World, **options: Any) -> World:
    options = {"record": "chat", "seq_len": 4096, "num_shards": 1, "max_bad_fraction": 1, **options}
    return world.plan(**options)


def pairs_of(world: World) -> Pairs:
    return [pair for each in world.samples() for pair in zip(each["input_ids"], each["labels"], strict=True)]


def expected(world: World, family: str, record: dict[str, Any], **variables: Any) -> Pairs:
    """Return the tokens of a record's conversation, with labels by the tags of the family's template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(world.tokenizer)
    found = tokenizer.apply_chat_template(
        record["messages"],
        tools=record.get("tools"),
        documents=record.get("documents"),
        chat_template=tagged(FAMILIES[family]),
        return_dict=True,
        return_assistant_tokens_mask=True,
        **variables,
    )
    rows = zip(found["input_ids"], found["assistant_masks"], strict=True)
    return [(token, token if is_set else -100) for token, is_set in rows]


def left_out(world: World) -> list[tuple[int, str]]:
    return [(entry["line"], entry["reason"]) for entry in world.lines("quarantine")]


def text_of(world: World, tokens: list[int]) -> str:
    return str(AutoTokenizer.from_pretrained(world.tokenizer).decode(tokens))


def learnt(world: World) -> str:
    """Return the text of all tokens with labels."""
    return text_of(world, [label for _, label in pairs_of(world) if label != -100])


def with_argument_strings(record: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(record)
    for message in changed["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return changed


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_ids_and_labels_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    """No conversation is left out: tools, thoughts in earlier turns, several turns, decomposed Hangul."""
    needs_strings = family.startswith("DeepSeek")
    world = planned(world_of(tmp_path, family, RECORDS)).run()
    assert left_out(world) == []
    wanted: Pairs = []
    for record in RECORDS:
        wanted += expected(world, family, with_argument_strings(record) if needs_strings else record)
    assert pairs_of(world) == wanted
    assert 0 < sum(label != -100 for _, label in wanted) < len(wanted)


def _sharegpt(speaker: str, value: str) -> dict[str, str]:
    return {"from": speaker, "value": value}


CALL = {"name": "get_weather", "arguments": {"city": "서울"}}
QUESTION, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}
TWO = [QUESTION, ANSWER, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "More."}]
CALLS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "12 C"},
    {"role": "assistant", "content": "It is 12."},
]


def _with_calls_as_json(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return message if calls is None else {**message, "tool_calls": json.dumps(calls)}


# Each record is in another form. Beside it, what it means.
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"messages": TWO}, {"messages": TWO}),
    ({"messages": json.dumps(TWO)}, {"messages": TWO}),
    ({"conversations": TWO}, {"messages": TWO}),
    (
        {"conversations": [_sharegpt("human", "Hi?"), _sharegpt("gpt", "Hello.")]},
        {"messages": [QUESTION, ANSWER]},
    ),
    (
        {"conversations": [_sharegpt("Human", "Hi?"), _sharegpt("GPT", "Hello.")]},
        {"messages": [QUESTION, ANSWER]},
    ),
    (
        {
            "system": "Be brief.",
            "conversations": [
                _sharegpt("human", "Weather?"), _sharegpt("function_call", json.dumps(CALL)),
                _sharegpt("observation", "12 C"), _sharegpt("gpt", "It is 12."),
            ],
            "tools": json.dumps(TOOLS),
        },
        {"messages": CALLS, "tools": TOOLS},
    ),
    ({"prompt": "Hi?", "completion": "Hello."}, {"messages": [QUESTION, ANSWER]}),
    ({"prompt": [QUESTION], "completion": [ANSWER]}, {"messages": [QUESTION, ANSWER]}),
    ({"instruction": "Hi?", "input": "", "output": "Hello."}, {"messages": [QUESTION, ANSWER]}),
    (
        {"instruction": "Add.", "input": "1 2", "output": "3", "history": [["Hi?", "Hello."]]},
        {"messages": [QUESTION, ANSWER, {"role": "user", "content": "Add.\n1 2"}, {"role": "assistant", "content": "3"}]},  # noqa: E501
    ),
    ({"messages": CALLS, "tools": TOOLS}, {"messages": CALLS, "tools": TOOLS}),
    (
        {"messages": [_with_calls_as_json(message) for message in CALLS], "tools": [json.dumps(TOOLS[0])]},
        {"messages": CALLS, "tools": TOOLS},
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i?"}]}, ANSWER]},  # noqa: E501
        {"messages": [QUESTION, ANSWER]},
    ),
]  # fmt: skip


def _with_json(given: dict[str, Any]) -> dict[str, Any]:
    """Return a record whose lists are JSON, as a column of a table has one type."""
    lists = {name: json.dumps(value) for name, value in given.items() if isinstance(value, list)}
    return {**given, **lists}


def test_conversations_with_tools_take_a_models_template_for_tools(tmp_path: Path) -> None:
    """transformers takes the template "tool_use" if there are tools, also if their list is empty."""
    records = [*RECORDS, {"messages": TWO, "tools": []}]
    world = world_of(tmp_path, "Qwen 3", records)
    config = world.tokenizer / "tokenizer_config.json"
    named = {"default": untagged(FAMILIES["Qwen 3"]), "tool_use": tagged(FAMILIES["GLM"])}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    (world.tokenizer / "chat_template.jinja").unlink()
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": listed}))
    planned(world, learn="last").run()
    assert left_out(world) == []
    tokenizer: Any = AutoTokenizer.from_pretrained(world.tokenizer)
    wanted: list[int] = []
    for record in records:
        wanted += tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"))["input_ids"]
    found = pairs_of(world)
    assert [token for token, _ in found] == wanted
    again = World(tmp_path / "again", raw_dir=world.raw_dir, tokenizer=world.data_dir / "tokenizer")
    assert planned(again, learn="last").plan_json()["plan_id"] == world.plan_json()["plan_id"]
    plain = planned(world_of(tmp_path / "plain", "Qwen 3", records), learn="last").run()
    assert [token for token, _ in pairs_of(plain)] != wanted


@pytest.mark.parametrize("number", [2, 3])
def test_a_shard_has_the_same_bytes_however_many_processes_render(tmp_path: Path, number: int) -> None:
    """The conversations of a batch are divided; one that is left out keeps its place among them."""
    records = [*RECORDS, {"messages": [QUESTION]}, *RECORDS[:3]]
    worlds = [world_of(tmp_path / name, "Qwen 3", records) for name in ("one", "several")]
    planned(worlds[0], learn="each").run()
    with mock.patch("preprocess.make.shared_work.num_renderers", return_value=number):
        planned(worlds[1], learn="each").run()
    assert left_out(worlds[0]) == left_out(worlds[1]) == [(len(RECORDS), "no_assistant")]
    one, several = (world.contents() for world in worlds)
    assert {name: one[name] for name in one if name.endswith((".tar", ".idx"))} == {
        name: several[name] for name in several if name.endswith((".tar", ".idx"))
    }


def test_of_several_conversations_over_a_limit_the_first_one_is_named(tmp_path: Path) -> None:
    """Both halves of the batch have one. The processes of a task render for the next plan, too."""
    bomb = {"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"size": 2**62}}
    world = world_of(tmp_path, "Qwen 3", [*RECORDS, bomb, *RECORDS, bomb])
    template = world.tokenizer / "chat_template.jinja"
    template.write_text("{% if size %}{{ 'x' * size }}{% endif %}" + template.read_text(encoding="utf-8"))
    with mock.patch("preprocess.make.shared_work.num_renderers", return_value=2):
        planned(world_of(tmp_path / "first", "Qwen 3", RECORDS)).run()
    ended = world.try_plan(record="chat", seq_len=4096, num_shards=1)
    place = sum(len(json.dumps(each, ensure_ascii=False).encode()) + 1 for each in RECORDS)
    ended.ends(65, f"byte {place}")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_records_are_recognized_by_their_fields(tmp_path: Path, suffix: str) -> None:
    forms = FORMS
    if suffix == "parquet":
        forms = [(_with_json(given), means) for given, means in FORMS]
    world = world_of(tmp_path, "Qwen 2.5", [given for given, _ in forms], suffix)
    planned(world).run().verify(deep=1)
    assert left_out(world) == []
    wanted = [pair for _, means in forms for pair in expected(world, "Qwen 2.5", means)]
    assert pairs_of(world) == wanted


def test_nulls_of_a_table_are_no_arguments_and_plan_says_what_it_reads(tmp_path: Path) -> None:
    """In a table each object has the keys of all others."""
    other = {"name": "get_time", "arguments": {"zone": "KST"}}
    records = []
    for call in (CALL, other):
        calls = [{"type": "function", "function": call}]
        records.append({"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]})
    world = planned(world_of(tmp_path, "Qwen 3", [{**each, "tools": TOOLS} for each in records], "parquet"))
    world.run()
    wanted = [pair for each in records for pair in expected(world, "Qwen 3", {**each, "tools": TOOLS})]
    assert pairs_of(world) == wanted
    told = world.try_plan(record="chat", seq_len=4096, num_shards=1, max_bad_fraction=1).ends(0)
    assert "tools" in told.text


def test_nulls_of_a_text_part_are_no_image(tmp_path: Path) -> None:
    """Records of a table have each key of all parts, and templates ask first whether there is an image."""
    world = world_of(tmp_path, "Qwen 2.5", [])
    content = "{% if part.image is defined or 'image' in part %}<image>{% else %}{{ part.text }}{% endif %}"
    template = untagged(FAMILIES["Qwen 2.5"]).replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        + content
        + "{% endfor %}{% endif %}",
    )
    (world.tokenizer / "chat_template.jinja").write_text(template, encoding="utf-8")
    part = {"type": "text", "text": "Hi?", "image": None}
    world.raw({"chats.jsonl": [{"messages": [{"role": "user", "content": [part]}, ANSWER]}]})
    planned(world).run()
    assert pairs_of(world) == expected(world, "Qwen 2.5", {"messages": [QUESTION, ANSWER]})


def test_variables_of_all_records_and_of_one_reach_the_template(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"messages": TWO},
        {"messages": TWO, "vars": {"date_string": "1 May 2026"}},
        {"messages": TWO, "vars": json.dumps({"date_string": "2 May 2026"})},
    ]
    world = world_of(tmp_path, "Llama 3.1", records)
    world = planned(world, chat_template_kwargs='{"date_string": "30 Apr 2026"}', kwargs_field="vars").run()
    wanted = []
    for record, date in zip(records, ("30 Apr 2026", "1 May 2026", "2 May 2026"), strict=True):
        wanted += expected(world, "Llama 3.1", record, date_string=date)
    assert pairs_of(world) == wanted
    options = {"record": "chat", "output_dir": tmp_path / "other"}
    world.try_plan(**options, chat_template_kwargs="{no").ends(2, "--chat_template_kwargs")
    world.try_plan(**options, chat_template_kwargs='{"tools": []}').ends(2, "tools")


def test_documents_and_named_fields_reach_the_template(tmp_path: Path) -> None:
    documents = [{"title": "A", "text": "kettle"}]
    record = {"messages": CALLS, "tools": TOOLS, "documents": documents}
    renamed = {"chat": {"messages": CALLS, "functions": TOOLS}, "context": documents}
    world = world_of(tmp_path, "Granite", [renamed])
    fields = {"text_field": "chat.messages", "tools_field": "functions", "documents_field": "context"}
    planned(world, **fields).run()
    assert pairs_of(world) == expected(world, "Granite", record)


def test_a_function_may_return_messages_with_tools(tmp_path: Path) -> None:
    world = world_of(tmp_path, "Qwen 3", [{"talk": CALLS, "functions": TOOLS}])
    function = tmp_path / "talks.py"
    function.write_text(
        "def transform(record):\n    return {'messages': record['talk'], 'tools': record['functions']}\n"
    )
    planned(world, transform=function).run(transform=function)
    assert pairs_of(world) == expected(world, "Qwen 3", {"messages": CALLS, "tools": TOOLS})


# What is learnt. ---------------------------------------------------------------------------------------


def _thoughtful(*weights: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation of three turns with thoughts, and these keys in their answers."""
    messages: list[dict[str, Any]] = []
    for number, more in enumerate(weights):
        messages.append({"role": "user", "content": f"Q{number}?"})
        messages.append(
            {"role": "assistant", "content": f"A{number}.", "reasoning_content": f"T{number}.", **more}
        )
    return {"messages": messages}


def _thinking(number: int) -> str:
    return f"<think>\nT{number}.\n</think>\n\nA{number}.<|im_end|>\n"


@pytest.mark.parametrize(
    ("options", "weights", "wanted"),
    [
        ({}, [{}, {}, {}], "A0.<|im_end|>\nA1.<|im_end|>\n" + _thinking(2)),
        ({"learn": "last"}, [{}, {}, {}], _thinking(2)),
        ({"learn": "each"}, [{}, {}, {}], _thinking(0) + _thinking(1) + _thinking(2)),
        ({"learn": "each"}, [{}, {"weight": 0}, {"train": True}], _thinking(0) + _thinking(2)),
        ({}, [{"train": False}, {"weight": 1}, {"weight": 0}], "A1.<|im_end|>\n"),
        ({"learn": "last", "learn_reasoning": "no"}, [{}, {}], "<think>\n\n</think>\n\nA1.<|im_end|>\n"),
    ],
)
def test_what_is_learnt_of_a_template_that_drops_earlier_thoughts(
    tmp_path: Path, options: dict[str, Any], weights: list[dict[str, Any]], wanted: str
) -> None:
    record = _thoughtful(*weights)
    world = planned(world_of(tmp_path, "Qwen 3", [record]), **options).run().verify(deep=1)
    assert learnt(world) == wanted
    # Each document is what transformers renders up to its last answer.
    ends = [6]
    if options.get("learn") == "each":
        ends = [2 * number + 2 for number, more in enumerate(weights) if more.get("weight") != 0]
    elif len(weights) == 2:
        ends = [4]
    tokens = []
    for end in ends:
        tokens += expected(world, "Qwen 3", {"messages": record["messages"][:end]})
    assert [token for token, _ in pairs_of(world)] == [token for token, _ in tokens]
    (manifest,) = world.manifests()
    assert manifest["counts"]["num_documents"] == len(ends)
    assert manifest["counts"]["num_empty_lines"] == 0


@pytest.mark.parametrize("learn", ["all", "each"])
def test_an_answer_before_the_first_question_is_learnt(tmp_path: Path, learn: str) -> None:
    """Some templates refuse messages without a question, and so cannot render this answer alone."""
    record = {"messages": [{"role": "assistant", "content": "Welcome."}, *TWO]}
    world = world_of(tmp_path, "Llama 4", [record])
    template = world.tokenizer / "chat_template.jinja"
    needs_user = "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ 1 / 0 }}{% endif %}"
    template.write_text(needs_user + template.read_text(encoding="utf-8"), encoding="utf-8")
    planned(world, learn=learn).run()
    assert left_out(world) == []
    assert pairs_of(world) == expected(world, "Llama 4", record)


def test_a_result_between_a_call_and_its_answer_is_not_learnt(tmp_path: Path) -> None:
    """Gemma 4's template shows a tool's result within the answer that has both a call and a content."""
    record = {"messages": [CALLS[1], CALLS[2] | {"content": "I asked."}, CALLS[3], CALLS[4]]}
    world = world_of(tmp_path, "Qwen 3", [record])
    template = """{% for m in messages %}{% if m.role == "user" %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == "assistant" %}<|im_start|>assistant
{% for call in m.tool_calls or [] %}<|calls|>{{ call.function.arguments.city }}<|endcalls|>{% endfor %}\
{% if m.tool_calls and not loop.last %}<|observation|>{{ messages[loop.index].content }}<|end|>{% endif %}\
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    (world.tokenizer / "chat_template.jinja").write_text(template, encoding="utf-8")
    planned(world).run()
    assert left_out(world) == []
    assert learnt(world) == "<|calls|>서울<|endcalls|>I asked.<|im_end|>\nIt is 12.<|im_end|>\n"


def test_answers_that_do_not_change_share_a_document(tmp_path: Path) -> None:
    record = {"messages": CALLS + TWO, "tools": TOOLS}
    world = planned(world_of(tmp_path, "Llama 4", [record]), learn="each").run()
    assert pairs_of(world) == expected(world, "Llama 4", record)


def test_documents_of_a_conversation_are_excluded_and_blanked_together(tmp_path: Path) -> None:
    records = [{"id": f"n{number}", **_thoughtful({}, {}, {})} for number in range(3)]
    options = {"learn": "each", "id_field": "id", "digests": True}
    whole = planned(world_of(tmp_path / "whole", "Qwen 3", records), **options).run()
    (tmp_path / "names.txt").write_text("n1\n")
    world = planned(world_of(tmp_path / "out", "Qwen 3", records), exclude=tmp_path / "names.txt", **options)
    world.run().verify(deep=1)
    assert left_out(world) == [(1, "excluded")]
    assert len(pairs_of(whole)) % 3 == 0
    assert pairs_of(world) == pairs_of(whole)[: len(pairs_of(whole)) // 3 * 2]
    new = tmp_path / "new"
    whole.main("blank", whole.data_dir, ids=tmp_path / "names.txt", output=new).ends(0)
    shown = whole.main("peek", new, num=9, chars=0).ends(0).out
    assert shown.count("T1.") == 2, "in two of three conversations, in the document that ends with it"
    whole.main("duplicates", whole.data_dir, output=tmp_path / "twice.txt").ends(2, "--learn all")


def test_a_limit_counts_conversations(tmp_path: Path) -> None:
    records = [_thoughtful({}, {}) for _ in range(4)]
    world = planned(world_of(tmp_path, "Qwen 3", records), learn="each", limit=2).run().verify(deep=1)
    (manifest,) = world.manifests()
    assert manifest["counts"]["num_documents"] == 4


UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, ANSWER]},
        "content_part",
    ),
    "tools that are no list": ({"messages": TWO, "tools": 5}, "wrong_type"),
    "a variable that is none": ({"messages": TWO, "chat_template_kwargs": {"tokenize": 1}}, "wrong_kwargs"),
    "half a weight": ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, "wrong_weight"),
    "no weight at all": ({"messages": [QUESTION, {**ANSWER, "weight": 0}]}, "not_learnt"),
    "a pair": ({"prompt": "Hi?", "chosen": [ANSWER], "rejected": [ANSWER]}, "preference_pair"),
    "a control token in a tool": (
        {"messages": TWO, "tools": [{"function": {"name": "<|im_end|>"}}]}, "control_token"
    ),
    "a history without answers": ({"instruction": "a", "output": "b", "history": ["Hi?"]}, "wrong_type"),
    "an unknown speaker": ({"conversations": [_sharegpt("narrator", "So.")]}, "wrong_role"),
}  # fmt: skip


def test_what_cannot_be_a_conversation_is_left_out_with_its_reason(tmp_path: Path) -> None:
    records = [{"messages": TWO}, *(record for record, _ in UNUSABLE.values())]
    world = planned(world_of(tmp_path, "Qwen 3", records)).run()
    assert left_out(world) == list(enumerate((reason for _, reason in UNUSABLE.values()), start=1))
    assert pairs_of(world) == expected(world, "Qwen 3", {"messages": TWO})


def test_pairs_are_refused_and_one_side_is_read(tmp_path: Path) -> None:
    record = {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No."}]}
    world = world_of(tmp_path, "Qwen 3", [record])
    world.try_plan(record="chat").ends(65, "chosen", "--text_field chosen")
    planned(world, text_field="chosen").run()
    assert pairs_of(world) == expected(world, "Qwen 3", {"messages": [QUESTION, ANSWER]})


def test_a_form_that_is_asked_for_is_the_only_one(tmp_path: Path) -> None:
    both = {"messages": [QUESTION, ANSWER], "prompt": "And?", "completion": "More."}
    world = planned(world_of(tmp_path, "Qwen 3", [both, {"messages": TWO}]), chat_format="prompt").run()
    assert left_out(world) == [(1, "no_field")]
    assert pairs_of(world) == expected(world, "Qwen 3", {"messages": TWO[2:]})


def test_plan_shows_what_is_learnt_and_counts_say_how_much(tmp_path: Path) -> None:
    world = world_of(tmp_path, "Qwen 3", [{"messages": CALLS, "tools": TOOLS}])
    told = world.try_plan(record="chat", seq_len=4096, num_shards=1).ends(0).text
    shown = "\n".join(line.removeprefix("  ") for line in told.splitlines())
    assert '⟪<tool_call>\n{"name": "get_weather", "arguments": {"city": "서울"}}\n</tool_call>' in shown
    assert "It is 12.<|im_end|>\n⟫" in shown
    assert "get_weather" in shown.partition("⟪<tool_call>")[0], "the tools"
    planned(world).run()
    num_learnt = sum(label != -100 for _, label in pairs_of(world))
    assert f"{num_learnt} of its {len(pairs_of(world))} tokens" in told
    (manifest,) = world.manifests()
    assert manifest["counts"]["sources"]["."]["num_learnt_tokens"] == num_learnt
    status = json.loads(world.main("status", world.data_dir, json=True).ends(0).out)
    assert status["sources"]["."]["num_learnt_tokens"] == num_learnt
    peeked = world.main("peek", world.data_dir, chars=0).ends(0).out
    assert "<tool_response>\n  12 C\n  </tool_response>" in peeked
    report = json.loads(world.main("report", world.data_dir, json=True).ends(0).out)
    assert report["sources"][0]["num_learnt_tokens"] == num_learnt
