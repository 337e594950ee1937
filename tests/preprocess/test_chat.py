"""``--record chat``: ids and loss mask are transformers' own, and what is no conversation is named."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.read import chat as chat_rendering
from shardprep.errors import BadInput, OtherTokenizer, ReadWriteError, Refused, UsageError
from shardprep.format.plan import need_plan
from shardprep.format.shards import ShardSamples
from shardprep.own_packages import HOME
from tests import chat_sets
from tests.chat_sets import PLAIN, TAGGED, chat_model, conversations, write_chats
from tests.conftest import forge_shard
from tests.waiting import HANG_S, wait_until

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes  # what renders conversations is one

CHATS = conversations(60)
OPTIONS: dict[str, Any] = {"record": "chat", "seq_len": 64, "num_shards": 2}
Pairs = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def models(prep: Prep, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: chat_model(prep.model_dir, folder / name, text)
        for name, text in {"tagged": TAGGED, "plain": PLAIN}.items()
    }


def test_what_renders_is_of_the_copy_of_the_project_that_asks(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    for package in ("preprocess", "shardprep"):
        shutil.copytree(HOME / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "preprocess/read/chat.py").open("a") as file:
        file.write("\n_of_template = _tokenizer_facts\n\n\ndef _tokenizer_facts(folder):\n")
        file.write("    return _of_template(folder) | {'by': __file__}\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from preprocess.read.chat import _asked; "
        f"print(_asked({{'folder': {str(models['tagged'])!r}}})[0]['by'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.strip() == str(tmp_path / "preprocess/read/chat.py"), done.stderr


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats"), CHATS)


def make(prep: Prep, raw: Path, out: Path, model: Path, **options: Any) -> Path:
    prep.plan(raw, out, **{**OPTIONS, "model_id": str(model), **options})
    prep.make(out)
    return out


def rows_of(folder: Path) -> list[tuple[list[int], list[int], list[int]]]:
    """Ids, mask and starts of every row, without padding."""
    plan, rows = need_plan(folder), []
    for shard_id in range(plan.num_shards):
        with ShardSamples(folder, plan.spec, shard_id) as samples:
            for number in range(len(samples.records)):
                mask = samples.loss_mask(number).astype(int).tolist()
                rows.append((samples.ids(number).tolist(), mask, samples.starts(number).tolist()))
    return rows


def joined(folder: Path) -> Pairs:
    """The conversations of rows packed by concat."""
    rows, starts, at = rows_of(folder), [], 0
    for ids, _, of_row in rows:
        starts += [at + start for start in of_row]
        at += len(ids)
    return chat_sets.cut([(ids, mask) for ids, mask, _ in rows], starts)


def test_ids_and_mask_are_those_of_apply_chat_template_where_the_template_has_the_tags(
    prep: Prep, raw: Path, tmp_path: Path, models: dict[str, Path]
) -> None:
    found = joined(make(prep, raw, tmp_path / "out", models["tagged"]))
    assert found == chat_sets.expected(models["tagged"], CHATS)
    assert 0 < sum(map(sum, (mask for _, mask in found))) < sum(len(mask) for _, mask in found)


def test_without_the_tags_the_mask_is_what_a_search_for_answers_finds(
    prep: Prep, raw: Path, tmp_path: Path, models: dict[str, Path]
) -> None:
    found = joined(make(prep, raw, tmp_path / "out", models["plain"]))
    assert found == chat_sets.searched(models["plain"], CHATS)


def test_best_fit_keeps_each_conversation_whole_with_its_mask(
    prep: Prep, raw: Path, tmp_path: Path, models: dict[str, Path]
) -> None:
    folder = make(prep, raw, tmp_path / "out", models["tagged"], pack="best_fit", seq_len=512)
    found = [
        (ids[begin:end], mask[begin:end])
        for ids, mask, starts in rows_of(folder)
        for begin, end in itertools.pairwise([*starts, len(ids)])
    ]
    expected = chat_sets.expected(models["tagged"], CHATS)
    assert max(len(ids) for ids, _ in expected) <= 512, "each fits into a row"
    assert sorted(found) == sorted(expected)


def test_parquet_gives_what_json_lines_give(
    prep: Prep, raw: Path, tmp_path: Path, models: dict[str, Path]
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "raw").mkdir()
    table = arrow.table({"chat": CHATS, "n": list(range(len(CHATS)))})
    parquet.write_table(table, tmp_path / "raw" / "chats.parquet", row_group_size=20)
    columns = make(prep, tmp_path / "raw", tmp_path / "a", models["tagged"], text_field="chat")
    assert joined(columns) == joined(make(prep, raw, tmp_path / "b", models["tagged"]))


def test_messages_that_tables_keep_as_json_give_what_json_lines_give(
    prep: Prep, tmp_path: Path, models: dict[str, Path]
) -> None:
    """datasets 5 has a list of JSON, DuckDB a column of JSON or of strings, and some write JSON in JSON."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chats, folder = CHATS[:12], tmp_path / "raw"
    write_chats(folder, chats)
    whole = arrow.array([json.dumps(chat) for chat in chats])
    each = arrow.array([[json.dumps(message) for message in chat] for chat in chats])
    tables = {"strings": whole, "lists of strings": each, "dictionary": whole.dictionary_encode()}
    if hasattr(arrow, "json_"):  # pyarrow 19
        kind = arrow.json_(arrow.string())
        items = arrow.ExtensionArray.from_storage(kind, each.values)
        content = [message["content"] for chat in chats for message in chat]
        tables |= {
            "JSON": arrow.ExtensionArray.from_storage(kind, whole),
            "lists of JSON": arrow.ListArray.from_arrays(each.offsets, items),
            "JSON in messages": arrow.ListArray.from_arrays(
                each.offsets,
                arrow.StructArray.from_arrays(
                    [
                        arrow.array([message["role"] for chat in chats for message in chat]),
                        arrow.ExtensionArray.from_storage(kind, arrow.array(map(json.dumps, content))),
                    ],
                    ["role", "content"],
                ),
            ),
        }
    for name, column in tables.items():
        parquet.write_table(arrow.table({"messages": column}), folder / f"{name}.parquet")
    (folder / "strings.jsonl").write_text(
        "".join(json.dumps({"messages": it}) + "\n" for it in whole.to_pylist())
    )
    out = make(prep, folder, tmp_path / "out", models["tagged"], num_shards=None)
    plan, expected = need_plan(out), chat_sets.expected(models["tagged"], chats)
    assert len(plan.inputs) == 2 + len(tables)
    for shard_id, item in enumerate(plan.inputs):
        with ShardSamples(out, plan.spec, shard_id) as samples:
            ids = [number for row in range(len(samples.records)) for number in samples.ids(row).tolist()]
        assert ids == [number for chat, _ in expected for number in chat], item.path


def test_one_bad_conversation_of_a_table_is_left_out_and_the_others_stay(
    prep: Prep, tmp_path: Path, models: dict[str, Path]
) -> None:
    arrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    chats, folder = CHATS[:12], tmp_path / "raw"
    folder.mkdir()
    data = arrow.array(
        [[{"role": m["role"], "content": m["content"].encode()} for m in chat] for chat in chats]
    )
    content = data.values.field("content").to_pylist()
    bad_message = data.offsets[3].as_py()
    content[bad_message] = b"\xff, which is no UTF-8"
    as_bytes = arrow.array(content)
    texts = arrow.Array.from_buffers(arrow.string(), len(content), as_bytes.buffers())
    messages = arrow.StructArray.from_arrays([data.values.field("role"), texts], ["role", "content"])
    table = arrow.table({"messages": arrow.ListArray.from_arrays(data.offsets, messages)})
    with ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    out = make(prep, folder, tmp_path / "out", models["tagged"], num_shards=1, max_bad_fraction=0.5)
    (line,) = (out / "quarantine/shard-00000.jsonl").read_text().splitlines()
    assert (json.loads(line)["reason"], json.loads(line)["source_offset"]) == ("undecodable", 3)
    expected = chat_sets.expected(models["tagged"], chats[:3] + chats[4:])
    assert joined(out) == expected


BAD: dict[str, tuple[Any, str]] = {
    "no messages": ([], "no_messages"),
    "a missing field": (None, "null_field"),
    "messages as a text": ("user: hi", "wrong_type"),
    "a message that is no object": (["hi"], "wrong_role"),
    "a role of no template": ([{"role": "poet", "content": "hi"}], "wrong_role"),
    "a question without an answer": ([{"role": "user", "content": "hi"}], "no_assistant"),
    "a message without a content": (
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": {"a": 1}["a"] and None}],
        "template_error",
    ),
    "a control token": (
        [{"role": "user", "content": "a<|eot_id|>b"}, {"role": "assistant", "content": "no"}],
        "control_token",
    ),
}
STRICT = TAGGED.replace(
    "{{ bos_token }}{% for m in messages %}",
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['content'] is not defined %}{{ raise_exception('no content') }}{% endif %}",
)


def test_what_is_no_conversation_is_left_out_with_its_reason(prep: Prep, tmp_path: Path) -> None:
    model = chat_model(prep.model_dir, tmp_path / "model", STRICT)
    chats = [CHATS[0], *(chat for chat, _ in BAD.values()), CHATS[1]]
    raw = write_chats(tmp_path / "raw", chats)
    out = make(prep, raw, tmp_path / "out", model, num_shards=1, max_bad_fraction=1.0)
    lines = [json.loads(line) for line in (out / "quarantine" / "shard-00000.jsonl").open(encoding="utf-8")]
    assert [line["reason"] for line in lines] == [reason for _, reason in BAD.values()]
    assert [line["line"] for line in lines] == list(range(1, len(chats) - 1))
    assert "no content" in next(line["detail"] for line in lines if line["reason"] == "template_error")
    assert len(joined(out)) == 2


def test_too_many_bad_conversations_fail_the_shard_and_the_line_says_why(
    prep: Prep, tmp_path: Path, models: dict[str, Path]
) -> None:
    raw = write_chats(tmp_path / "raw", [CHATS[0], [{"role": "user", "content": "hi"}]])
    with pytest.raises(BadInput, match="no_assistant"):
        make(prep, raw, tmp_path / "out", models["tagged"], num_shards=1)


def test_control_tokens_that_are_allowed_are_those_of_apply_chat_template(
    prep: Prep, tmp_path: Path, models: dict[str, Path]
) -> None:
    chats = [[{"role": "user", "content": "a<|eot_id|>b"}, {"role": "assistant", "content": "no"}]]
    raw = write_chats(tmp_path / "raw", chats)
    out = make(prep, raw, tmp_path / "out", models["tagged"], num_shards=1, allow_special_tokens=True)
    assert joined(out) == chat_sets.expected(models["tagged"], chats)


FORGETS = PLAIN.replace(
    "{{ m['content'] }}", "{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}"
)
NEVER = "{{ messages|length }} turns: " + PLAIN


def test_a_template_whose_parts_are_no_beginnings_is_refused_when_planning(
    prep: Prep, raw: Path, tmp_path: Path
) -> None:
    model = chat_model(prep.model_dir, tmp_path / "model", NEVER)
    with pytest.raises(UsageError, match=r"{% generation %}.*--chat_template_file"):
        prep.plan(raw, tmp_path / "out", **OPTIONS, model_id=str(model))


def test_a_conversation_whose_parts_are_no_beginnings_is_left_out(prep: Prep, tmp_path: Path) -> None:
    model = chat_model(prep.model_dir, tmp_path / "model", FORGETS)
    one = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]
    raw = write_chats(tmp_path / "raw", [one, one + one])
    out = make(prep, raw, tmp_path / "out", model, num_shards=1, max_bad_fraction=0.5)
    assert need_plan(out).num_shards == 1
    (line,) = [json.loads(line) for line in (out / "quarantine" / "shard-00000.jsonl").open(encoding="utf-8")]
    assert (line["line"], line["reason"]) == (1, "no_beginning")
    assert joined(out) == chat_sets.searched(model, [one])


def test_a_template_of_todays_date_gives_equal_bytes_on_any_day(
    prep: Prep, raw: Path, tmp_path: Path
) -> None:
    model = chat_model(prep.model_dir, tmp_path / "model", "{{ strftime_now('%d %b %Y') }}\n" + TAGGED)
    out = make(prep, raw, tmp_path / "out", model, num_shards=1)
    shown = prep.command("peek", out, "--num", 1)
    assert "26 Jul 2024" in shown.text, shown.text


def test_a_file_stands_in_place_of_the_tokenizers_own_template(
    prep: Prep, raw: Path, tmp_path: Path, models: dict[str, Path]
) -> None:
    with pytest.raises(UsageError, match="has no chat template"):
        prep.plan(raw, tmp_path / "out", **OPTIONS)
    file = tmp_path / "tagged.jinja"
    file.write_text(TAGGED, encoding="utf-8")
    out = make(prep, raw, tmp_path / "out", prep.model_dir, chat_template_file=file)
    assert joined(out) == chat_sets.expected(models["tagged"], CHATS)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
COSTLY = {
    "one that does not end": (PLAIN + ENDLESS, "CPU time"),
    "a huge text": (PLAIN + "{{ 'a' * 3000000000 }}", "memory"),
    "a long text": (PLAIN + "{{ 'a' * 90000000 }}", "characters"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_planning_ends_with_an_error_where_a_template_takes_too_much(
    prep: Prep, raw: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_rendering, "_MOST_CPU_S", 2)
    template, what = COSTLY[name]
    model = chat_model(prep.model_dir, tmp_path / "model", template)
    flags = ("--input_dir", raw, "--output_dir", tmp_path / "out", "--model_id", model, "--record", "chat")
    ended = prep.command("plan", *flags)
    assert ended.code == 2, ended.text
    assert what in ended.text, ended.text
    assert "--chat_template_file" in ended.text, ended.text


def test_a_conversation_that_takes_too_much_is_not_left_out_but_an_error_that_names_it(
    prep: Prep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = TAGGED + "{% if 'for ever' in messages[0]['content'] %}" + ENDLESS + "{% endif %}"
    model = chat_model(prep.model_dir, tmp_path / "model", template)
    costly = [{"role": "user", "content": "for ever"}, {"role": "assistant", "content": "no"}]
    raw = write_chats(tmp_path / "raw", [CHATS[0], costly, CHATS[1]])
    offset = len((raw / "chats.jsonl").read_bytes().splitlines(keepends=True)[0])
    monkeypatch.setattr(chat_rendering, "_MOST_CPU_S", 1)
    with pytest.raises(BadInput, match=rf"chats\.jsonl byte {offset}\b"):
        make(prep, raw, tmp_path / "out", model, max_bad_fraction=1.0)


def test_a_killed_command_leaves_no_renderer_behind(prep: Prep, raw: Path, tmp_path: Path) -> None:
    model = chat_model(prep.model_dir, tmp_path / "model", PLAIN + ENDLESS)
    is_subreaper = 36  # PR_SET_CHILD_SUBREAPER: an orphan becomes this process's child, which sees its end
    assert ctypes.CDLL(None).prctl(is_subreaper, 1, 0, 0, 0) == 0
    flags = ("--input_dir", raw, "--output_dir", tmp_path / "out", "--model_id", model, "--record", "chat")
    with prep.start("plan", *flags) as command:
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children")

        def limits_of_renderer() -> str:
            assert command.poll() is None, "it ended before it could be killed"
            return "".join(Path(f"/proc/{pid}/limits").read_text() for pid in children.read_text().split())

        # The template runs once the limit of CPU time stands.
        wait_until(lambda: re.search(r"Max cpu time +\d", limits_of_renderer()))
        renderer = int(children.read_text())
        command.kill()
    assert ctypes.CDLL(None).prctl(is_subreaper, 0, 0, 0, 0) == 0
    _, status = os.waitpid(renderer, 0)
    assert os.waitstatus_to_exitcode(status) == 1, "it ended by itself, before its limit"


@pytest.mark.parametrize(("name", "most"), [("plain", 700), ("tagged", 8000)])
def test_conversations_of_so_many_answers_that_rendering_takes_too_long_are_left_out(
    prep: Prep, tmp_path: Path, models: dict[str, Path], name: str, most: int
) -> None:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    chats = [turns * (most // 10), turns * (most + most // 20), turns * (most * 5)]
    raw = write_chats(tmp_path / "raw", chats)
    out = make(prep, raw, tmp_path / "out", models[name], num_shards=1, max_bad_fraction=1.0)
    lines = [json.loads(line) for line in (out / "quarantine" / "shard-00000.jsonl").open(encoding="utf-8")]
    assert [line["line"] for line in lines] == [1, 2]
    assert {line["reason"] for line in lines} == {"too_many_answers"}
    assert f"{most + most // 20} answers" in lines[0]["detail"]
    assert [sum(mask) for _, mask in joined(out)] == [2 * (most // 10)], "each answer and the end of its turn"


def test_an_altered_template_is_refused(prep: Prep, raw: Path, tmp_path: Path) -> None:
    model = chat_model(prep.model_dir, tmp_path / "model", TAGGED)
    out = make(prep, raw, tmp_path / "out", model)
    (model / "chat_template.jinja").write_text(TAGGED + " ", encoding="utf-8")
    with pytest.raises(Refused, match="chat_template was"):
        prep.plan(raw, out, **OPTIONS, model_id=str(model))
    (out / "tokenizer" / "chat_template.jinja").write_text(TAGGED + " ", encoding="utf-8")
    with pytest.raises(OtherTokenizer, match=r"chat_template\.jinja"):
        prep.make(out)


def test_another_version_of_what_renders_is_refused(
    prep: Prep, raw: Path, tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = make(prep, raw, tmp_path / "out", models["tagged"])
    monkeypatch.setattr(chat_rendering, "chat_versions", lambda: "transformers 6.0, jinja2 4.0")
    with pytest.raises(Refused, match=r"here transformers 6\.0"):
        prep.make(out)


def test_a_renderer_that_died_is_an_error_and_the_next_attempt_starts_another(
    prep: Prep, raw: Path, tmp_path: Path, models: dict[str, Path]
) -> None:
    out = tmp_path / "out"
    prep.plan(raw, out, **OPTIONS, model_id=str(models["tagged"]))
    child = chat_rendering._child()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with pytest.raises(ReadWriteError, match="ended with -9"):
        prep.make(out)
    assert prep.names(out) == ["plan.json", "tokenizer"], "nothing is left of the attempt"
    prep.make(out)
    assert joined(out) == chat_sets.expected(models["tagged"], CHATS)


def test_an_export_that_would_lose_the_mask_is_refused(
    prep: Prep, raw: Path, tmp_path: Path, models: dict[str, Path]
) -> None:
    out = make(prep, raw, tmp_path / "out", models["tagged"])
    ended = prep.command("export", out, "--to", "nanogpt", "--output_dir", tmp_path / "export")
    assert ended.code == 2
    assert "loss mask" in ended.text


def test_peek_shows_what_has_labels(prep: Prep, raw: Path, tmp_path: Path, models: dict[str, Path]) -> None:
    out = make(prep, raw, tmp_path / "out", models["plain"], seq_len=512, pack="best_fit")
    shown = prep.command("peek", out, "--num", 99, "--chars", 0)
    answers = [turn["content"] for chat in CHATS for turn in chat if turn["role"] == "assistant"]
    questions = [turn["content"] for chat in CHATS for turn in chat if turn["role"] == "user"]
    text = shown.text.replace("\n  ", "\n")
    assert all(f"⟪{answer}⟦<|eot_id|>⟧⟫" in text for answer in answers)
    assert any(f"⟪{question}" not in text for question in questions)


def test_a_mask_that_cannot_lie_in_the_tar_is_found(
    prep: Prep, raw: Path, tmp_path: Path, models: dict[str, Path]
) -> None:
    out = make(prep, raw, tmp_path / "out", models["tagged"], num_shards=1)
    plan = need_plan(out)
    with ShardSamples(out, plan.spec, 0) as samples:
        records = samples.records.copy()
    records["mask_offset"][1] = 10**9
    forge_shard(out, 0, records=records)
    ended = prep.command("verify", out)
    assert ended.code == 65
    assert "places sample 1 where it cannot be" in ended.text
