"""A line of JSON is judged by itself: its keys, however they are spelled, and its numbers, however long."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.read.documents import read_records
from preprocess.read.text_fields import MessageFields, TextFields
from shardprep.format.manifest import read_manifest
from shardprep.format.options import PlanOptions
from shardprep.format.plan import ByteRange
from tests.chat_sets import TAGGED, chat_model

if TYPE_CHECKING:
    from tests.conftest import Prep

Rows = list[tuple[int, str, str]]  # line, text, id


def rows_of(path: Path, fields: TextFields, batch_bytes: int) -> tuple[Rows, dict[int, str]]:
    """What is read of a file, and the details of what is left out, by line."""
    part = ByteRange(input_number=0, path=path, start=0, end=path.stat().st_size)
    rows: Rows = []
    bad: dict[int, str] = {}
    for documents in read_records([part], PlanOptions(), fields, batch_bytes=batch_bytes):
        texts = [text.decode() for text in documents.texts]
        ids = documents.columns.get("id", [""] * len(texts))
        rows += zip(documents.lines.tolist(), texts, ids, strict=True)
        bad |= {one.line: one.detail for one in documents.bad}
    return rows, bad


class Pairs(list[tuple[str, Any]]):
    """An object as JSON has it: each key with its value, in order."""


def only_value(pairs: Any, name: str) -> Any:
    """The value of a key that stands once. Raises LookupError where it stands twice, or not at all."""
    values = [value for key, value in pairs if key == name] if isinstance(pairs, Pairs) else []
    if len(values) != 1:
        raise LookupError(name)
    return values[0]


def as_value(value: Any) -> Any:
    """Objects as dicts. Raises LookupError where a key stands twice in one."""
    if isinstance(value, Pairs):
        if len({key for key, _ in value}) < len(value):
            raise LookupError
        return {key: as_value(item) for key, item in value}
    return [as_value(item) for item in value] if isinstance(value, list) else value


def expected_of(data: str, paths: list[list[str]]) -> Rows:
    """The standard library's reader, a line at a time; ``paths``: of the text."""
    rows: Rows = []
    for number, line in enumerate(data.split("\n")):
        try:
            record = json.loads(line, object_pairs_hook=Pairs)
            values = []
            for path in paths:
                value = record
                for name in path:
                    value = only_value(value, name)
                values.append(as_value(value))
            if paths == [["messages"]]:
                assert isinstance(values[0], list)
                text = json.dumps(values[0], ensure_ascii=False)
            else:
                assert all(isinstance(value, str) for value in values)
                text = "|".join(values)
        except (ValueError, LookupError, AssertionError):
            continue
        name = json.loads(line).get("id")
        name = "" if name is None else name if isinstance(name, str) else json.dumps(name, ensure_ascii=False)
        if text.strip():
            rows.append((number, text, name))
    return rows


KEYS = [
    '"text"', '"te\\u0078t"', '"\\u0074\\u0065\\u0078\\u0074"', '"text"\t', '"text" ', '"meta"',
    '"me\\u0074a"', '"본문"', '"\\ubcf8\\uBB38"', '"other"', '"id"', '"messages"', '"\\u006Dessages" ',
    '"role"', '"content"',
]  # fmt: skip
TEXTS = ['"a"', '"가 \\"text\\": b"', '"x\\\\"', '"\\"text"', '"\\\\u0074ext\\":"', "7", "null"]
NUMBERS = ["18446744073709551616", "-9223372036854775809", "9007199254740993", "1.0", "-0", "-0.0", "1e5"]
CHOICES: dict[str, tuple[TextFields, list[list[str]]]] = {
    "a field": (TextFields("text", id_field="id"), [["text"]]),
    "a nested field": (TextFields("meta.text"), [["meta", "text"]]),
    "letters beyond ASCII": (TextFields("본문", id_field="id"), [["본문"]]),
    "a template": (TextFields("", "{text}|{meta.text}"), [["text"], ["meta", "text"]]),
    "messages": (MessageFields("messages", id_field="id"), [["messages"]]),
}


def objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(st.sampled_from(KEYS), values), max_size=4)
    return pairs.map(lambda pairs: "{" + ",".join(f"{key}:{value}" for key, value in pairs) + "}")


VALUES = st.sampled_from([*TEXTS, *NUMBERS])
RECORDS = objects(
    st.one_of(
        VALUES, objects(VALUES), st.lists(objects(VALUES), max_size=2).map(lambda x: f"[{','.join(x)}]")
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_taken_of_a_line_depends_neither_on_others_nor_on_the_batch(
    tmp_path: Path, choice: str
) -> None:
    fields, paths = CHOICES[choice]
    first = paths[0][0]
    value = {"meta": '{"text": "a"}', "messages": '[{"role":"user","content":"a"}]'}.get(first, '"a"')
    right = f'{{"{first}": {value}, "meta": {{"text": "b"}}}}' if first != "meta" else f'{{"meta": {value}}}'
    path = tmp_path / "a.jsonl"

    @settings(max_examples=150)
    @given(
        lines=st.lists(st.one_of(RECORDS, st.just(right), st.just(right), st.just("")), max_size=12),
        batch_bytes=st.sampled_from([1, 40, 100, 300, 1 << 19]),
    )
    def check(lines: list[str], batch_bytes: int) -> None:
        data = "\n".join([*lines, ""])
        path.write_text(data, encoding="utf-8")
        found, bad = rows_of(path, fields, batch_bytes)
        whole = rows_of(path, fields, 1 << 19)
        assert (found, bad) == whole
        rows = [
            (line, json.dumps(json.loads(text), ensure_ascii=False) if choice == "messages" else text, name)
            for line, text, name in found
        ]
        expected = expected_of(data, paths)
        assert [row if fields.id_path else (*row[:2], "") for row in expected] == rows

    check()


LONG = [18446744073709551616, -9223372036854775809, 10**30, 2**64 - 1, 7, 1.5, [2**70], {"a": 2**64}]


def test_ids_and_sources_that_are_long_integers_stay_exact(prep: Prep, tmp_path: Path, raw: Path) -> None:
    rows = [{"text": "a", "id": number, "from": number} for number in LONG]
    (raw / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prep.plan(raw, tmp_path / "data", id_field="id", source_field="from")
    prep.make(tmp_path / "data")
    kept = (tmp_path / "data/ids/shard-00000.jsonl").read_text().splitlines()
    assert [json.loads(line)[2] for line in kept] == list(map(json.dumps, LONG))
    assert set(read_manifest(tmp_path / "data", 0).counts.sources) == set(map(json.dumps, LONG))


CALLS = TAGGED.replace("{{ m['content'] }}", "{{ m['content'] }}{{ (m['call'] or 0) | tojson }}")


@pytest.mark.processes
def test_numbers_of_messages_are_rendered_as_pythons_json_reads_them(
    prep: Prep, tmp_path: Path, raw: Path
) -> None:
    from transformers import AutoTokenizer

    model = chat_model(prep.model_dir, tmp_path / "model", CALLS)
    too_large = ["1E400", "1" + "0" * 400]
    numbers = [*NUMBERS, "1.7976931348623157e308", "123456789012345678901234567890.5", *too_large]
    lines = [
        f'{{"messages": [{{"role": "user", "content": "a"}},'
        f' {{"role": "assistant", "content": "b", "call": {{"arguments": {{"x": {number}}}}}}}]}}'
        for number in numbers
    ]
    (raw / "a.jsonl").write_text("\n".join(lines))
    data = tmp_path / "data"
    prep.plan(raw, data, record="chat", seq_len=2048, model_id=str(model), max_bad_fraction=1.0)
    prep.make(data)
    shown = prep.command("peek", data, "--num", 99, "--chars", 0).text
    tokenizer = AutoTokenizer.from_pretrained(model)
    for number, line in list(zip(numbers, lines, strict=True))[:-2]:
        text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        said = json.dumps({"arguments": {"x": json.loads(number)}})
        assert said in text
        assert said in shown, number
    bad = [json.loads(line) for line in (data / "quarantine/shard-00000.jsonl").read_text().splitlines()]
    assert [line["line"] for line in bad] == [len(numbers) - 2, len(numbers) - 1]
    assert all("is too large, expected below 1.8e308" in line["detail"] for line in bad)


def test_a_key_that_stands_twice_anywhere_in_messages_leaves_the_conversation_out(tmp_path: Path) -> None:
    lines = [
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"messages": [{"role": "user", "content": "a", "con\\u0074ent": "b"}]}',
        '{"messages": [{"role": "user", "call": {"x": {"y": 1, "y": 2}}}]}',
        '{"messages": [], "messages": [{"role": "user", "content": "a"}]}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    found, bad = rows_of(path, MessageFields("messages"), 1 << 19)
    assert [line for line, _, _ in found] == [0]
    assert bad == {
        1: "the key content stands twice in one object",
        2: "the key y stands twice in one object",
        3: "the key messages stands twice in one object",
    }


def nested(kind: str, depth: int) -> str:
    """A value of that many lists or objects within each other."""
    return "[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth


@pytest.mark.slow
@pytest.mark.parametrize("stack", [1000, 5000])  # of the interpreter; another one in each version of Python
@pytest.mark.parametrize("kind", ["list", "object"])
def test_records_of_512_levels_are_read_and_deeper_ones_left_out_whatever_the_interpreters_stack(
    prep: Prep, tmp_path: Path, raw: Path, kind: str, stack: int
) -> None:
    forms = {
        "beside the text": '{"text": "good", "id": 1, "other": %s}',
        "as the id": '{"text": "good", "id": %s}',
        "where a key stands twice": '{"text": "good", "id": 1, "x": 1, "x": %s}',
        "with brackets in a text": '{"text": "good", "id": "%s", "other": %%s}' % ("\\\\[{" * 400),
        "as the text": '{"text": %s, "id": 1}',
    }
    lines = [form % nested(kind, depth) for form in forms.values() for depth in (511, 512, 984)]
    (raw / "a.jsonl").write_text("\n".join(lines) + "\n")
    data = tmp_path / "data"
    flags = ("--input_dir", raw, "--output_dir", data, "--model_id", prep.model_dir, "--id_field", "id")
    before = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(stack)
        for words in (
            ("plan", *flags, "--max_bad_fraction", 1),
            ("shard", "--shard_id", 0, "--output_dir", data),
        ):
            ended = prep.command(*words)
            assert ended.code == 0, ended.text
    finally:
        sys.setrecursionlimit(before)
    entries = (data / "quarantine" / "shard-00000.jsonl").read_text().splitlines()
    found = {entry["line"]: entry["reason"] for entry in map(json.loads, entries)}
    expected = {line: "bad_json" for line in range(len(lines)) if line % 3}
    assert found == {**expected, 12: "wrong_type"}


@pytest.mark.slow
@pytest.mark.processes
def test_a_conversation_of_512_levels_is_rendered_and_a_deeper_one_left_out(
    prep: Prep, tmp_path: Path, raw: Path
) -> None:
    model = chat_model(prep.model_dir, tmp_path / "model", TAGGED)
    form = '{"messages": [{"role": "user", "content": "a", "x": %s}, {"role": "assistant", "content": "b"}]}'
    lines = [form % nested(kind, depth) for kind in ("list", "object") for depth in (509, 510)]
    (raw / "a.jsonl").write_text("\n".join(lines) + "\n")
    data = tmp_path / "data"
    flags = ("--input_dir", raw, "--output_dir", data, "--model_id", model, "--max_bad_fraction", 1)
    for words in (("plan", *flags, "--record", "chat"), ("shard", "--shard_id", 0, "--output_dir", data)):
        ended = prep.command(*words)
        assert ended.code == 0, ended.text
    entries = (data / "quarantine" / "shard-00000.jsonl").read_text().splitlines()
    assert [(entry["line"], entry["reason"]) for entry in map(json.loads, entries)] == [
        (1, "bad_json"), (3, "bad_json")
    ]  # fmt: skip
