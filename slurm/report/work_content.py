"""How a data set was made, as sections of the report: means, speed over time, nodes, OSTs, retries."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from shardprep.console import short_bytes, short_number
from slurm.report.blocks import Block, BusyRows, Facts, Note, Section, Table, TimeLine
from slurm.report.words import TimeForm, Words, core_hours_text, heights, short_ids, time_text

_MOST_ROWS = 20  # of a table
_MOST_OSTS = 8
_MOST_NAMED = 5  # nodes beside a cause

Data = Mapping[str, Any]


def use_section(data: Data, words: Words) -> Section:
    """CPU, memory and time, against what was asked for."""
    use, title = data["use"], words("use")
    share = use["cpu_s"] / max(use["had_cpu_s"], 1e-3)
    hours = use["core_hours"]
    used_hours = core_hours_text(hours["used"])
    facts = [
        (
            words("cpu"),
            words(
                "cpu_of",
                used=words.time(use["cpu_s"]),
                had=words.time(use["had_cpu_s"]),
                share=f"{share:.0%}",
            ),
        ),
        (words("memory"), words("largest_process", size=short_bytes(use["max_rss_bytes"]))),
        (
            words("core_hours"),
            used_hours
            if hours["failed"] is None
            else words("core_hours_failed", used=used_hours, failed=core_hours_text(hours["failed"])),
        ),
    ]
    blocks: list[Block] = [Facts(items=facts)]
    submissions = data["attempts"]["submissions"][-_MOST_ROWS:]
    if not submissions:
        blocks.append(Note(text=words("not_submitted")))
        return Section(title=title, blocks=blocks)
    columns = [words(name) for name in ("submission", "asked_for", "memory_used", "longest_task")]
    blocks.append(Table(columns=columns, rows=[_used_row(each, words) for each in submissions]))
    if newest := use["newest_submission"]:
        asked = " ".join(f"--{name} {value:g}" for name, value in newest["next_time"].items())
        blocks.append(Facts(items=[(words("next_time"), asked)]))
    return Section(title=title, blocks=blocks)


def _used_row(each: Data, words: Words) -> list[str]:
    """What a task of a submission asked for, and the most that one used."""
    cpus = each["cpus_per_task"]
    asked = [words("cpus", number=cpus) if isinstance(cpus, int) else words("whole_node")]
    asked += [f"{each['mem_mb']:,} MB"] if each["mem_mb"] else []
    asked += [words("minutes", minutes=each["time_min"])] if each["time_min"] else []
    asked += [each["partition"]] if each["partition"] else []
    memory, longest = each["max_rss_mb"], each["longest_task_s"]
    return [
        str(each["number"]),
        ", ".join(asked),
        "-" if memory is None else f"{memory:,} MB",
        "-" if longest is None else words.time(longest),
    ]


def work_sections(data: Data, words: Words) -> list[Section]:
    """Speed and time per shard over time; then the nodes. Of a single shard there is nothing to draw."""
    work = data["work"]
    if not work:
        return []
    gaps_s = [gap["left_out_s"] for gap in work["gaps"]]
    per_s = words("n_tokens_per_s", number=short_number(work["tokens_per_s"]))
    facts = [
        (words("began"), time_text(work["began"], "seconds and zone")),
        (words("ended"), time_text(work["ended"], "seconds and zone")),
        (words("worked"), words.time(work["worked_s"])),
        (words("speed"), f"{per_s}, {short_bytes(work['bytes_per_s'])}/s"),
    ]
    if gaps_s:
        facts.append(
            (words("gaps"), words("gaps_together", number=len(gaps_s), time=words.time(sum(gaps_s))))
        )
    if work["slow_shards"]:
        named = [
            words("on_node", shard=f"{each['shard']:05d}", time=words.time(each["wall_s"]), node=each["node"])
            for each in work["slow_shards"]
        ]
        facts.append((words("slow_shards"), ", ".join(named)))
    if data["data"]["num_done"] == 1:
        facts.append((words("node"), work["nodes"][0]["node"]))
        return [Section(title=words("work"), blocks=[Facts(items=facts)])]
    labels = _tick_labels(work)
    charts: list[Block] = [Facts(items=facts), *_time_lines(work, words, labels)]
    return [Section(title=words("work"), blocks=charts, is_wide=True), _nodes(data, words, labels)]


def _tick_labels(work: Data) -> list[tuple[float, str]]:
    """The times below a chart, as exactly as its length asks."""
    length_s = work["ended"] - work["began"]
    form: TimeForm = "seconds" if length_s < 600 else "minutes" if length_s < 20 * 3600 else "date"
    return [(tick["at"], time_text(tick["time"], form)) for tick in work["ticks"]]


def _time_lines(work: Data, words: Words, labels: Sequence[tuple[float, str]]) -> list[TimeLine]:
    """Tokens per second, shards at once, and time per shard."""
    gaps = [gap["at"] for gap in work["gaps"]]
    speeds = [step["tokens_per_s"] for step in work["steps"]]
    running = [step["num_shards"] for step in work["steps"]]
    slowest = max(work["shard_s"]["most"], 1e-3)
    ranges = [
        None if each is None else (each["least"] / slowest, each["median"] / slowest, each["most"] / slowest)
        for each in (step["shard_s"] for step in work["steps"])
    ]
    per_s = words("n_tokens_per_s", number=short_number(max(speeds)))
    charts = [
        ("tokens_per_s_title", per_s, heights(speeds), ()),
        ("num_running_title", f"{max(running):.3g}", heights(running), ()),
        ("shard_s_title", words.time(slowest), (), ranges),
    ]
    return [
        TimeLine(
            title=words(name),
            most=most,
            heights=shares,
            ranges=boxes,
            labels=labels,
            gaps=gaps,
        )
        for name, most, shares, boxes in charts
    ]


def _nodes(data: Data, words: Words, labels: Sequence[tuple[float, str]]) -> Section:
    """A row for each node; those on which no shard was made, and tasks failed, are named below."""
    work, failed = data["work"], data["attempts"]["failed_tasks_of_nodes"]
    gaps = [gap["at"] for gap in work["gaps"]]
    busiest = max((value for node in work["nodes"] for value in node["busy"]), default=0) or 1
    rows = [
        (
            node["node"],
            _node_words(node, failed.get(node["node"], 0), words),
            [value / busiest for value in node["busy"]],
        )
        for node in work["nodes"]
    ]
    blocks: list[Block] = [BusyRows(title=words("nodes_busy"), rows=rows, labels=labels, gaps=gaps)]
    if len(rows) < work["num_nodes"]:
        blocks.append(Note(text=words("slowest_nodes", shown=len(rows), total=work["num_nodes"])))
    shown = {node["node"] for node in work["nodes"]}
    others = sorted((-number, node) for node, number in failed.items() if node not in shown)
    if others:
        named = ", ".join(f"{node} ({-number})" for number, node in others[:_MOST_ROWS])
        named += f", {words('and_more', number=more)}" if (more := len(others) - _MOST_ROWS) > 0 else ""
        blocks.append(Note(text=words("failing_nodes", nodes=named)))
    return Section(title=words("nodes"), blocks=blocks, is_wide=True)


def _node_words(node: Data, num_failed: int, words: Words) -> str:
    text = words("node_words", number=f"{node['num_shards']:,}", speed=short_bytes(node["bytes_per_s"]))
    return text + ", " + words("n_failed", number=num_failed) if num_failed else text


def osts_sections(data: Data, words: Words) -> list[Section]:
    """The fullest OSTs; none where osts.json does not say them."""
    osts = data["osts"]
    if not osts:
        return []
    fullest = sorted(osts, key=lambda each: -each["num_bytes"])[:_MOST_OSTS]
    rows = [
        [
            words("unknown") if each["ost"] is None else f"{each['ost']}",
            f"{each['num_shards']:,}",
            short_bytes(each["num_bytes"]),
        ]
        for each in fullest
    ]
    if more := len(osts) - len(fullest):
        rows.append([words("and_more", number=more), "", ""])
    most = max(1, fullest[0]["num_bytes"])
    shares = [each["num_bytes"] / most for each in fullest] + [None] * (len(rows) - len(fullest))
    table = Table(columns=[words("ost"), words("num_shards"), words("bytes")], rows=rows, shares=shares)
    note = Note(text=words("osts_note", number=sum(each["ost"] is not None for each in osts)))
    return [Section(title=words("osts"), blocks=[note, table])]


def attempts_sections(data: Data, words: Words) -> list[Section]:
    """What was submitted, and what was sent again and why; none where nothing ever was."""
    attempts = data["attempts"]
    if not attempts["submissions"]:
        return []
    columns = [words(name) for name in ("submission", "when", "tasks", "failed_tasks", "num_shards")]
    rows = [_submission_row(each) for each in attempts["submissions"][-_MOST_ROWS:]]
    facts = [
        (f"{words('retried')}: {each['cause']}", _retried_text(each, words)) for each in attempts["retried"]
    ]
    facts += [
        (f"{words('restarts')}: {how}", words("n_tasks", number=number))
        for how, number in attempts["restarts"].items()
    ]
    if number := attempts["num_restarted_shards"]:
        facts.append((words("restarted_shards"), f"{number:,}"))
    facts += [
        (f"{words('failed')}: {cause}", words("shards_named", shards=short_ids(ids)))
        for cause, ids in attempts["failed"].items()
    ]
    blocks: list[Block] = [Table(columns=columns, rows=rows), Facts(items=facts)]
    if attempts["failed"]:
        blocks.append(Note(text=words("send_again", folder=shlex.quote(data["folder"]))))
    elif not attempts["retried"]:
        blocks.append(Note(text=words("nothing_retried")))
    return [Section(title=words("attempts"), blocks=blocks)]


def _retried_text(each: Data, words: Words) -> str:
    """How many shards, which, and on which nodes the tasks had run; the most frequent five nodes."""
    text = f"{words('n_shards', number=each['num_shards'])}: {short_ids(each['shards'])}"
    nodes = sorted(each["nodes"].items(), key=lambda item: (-item[1], item[0]))
    if not nodes:
        return text
    named = ", ".join(node if number == 1 else f"{node} ({number})" for node, number in nodes[:_MOST_NAMED])
    if more := len(nodes) - _MOST_NAMED:
        named += f", {words('and_more', number=more)}" if more > 0 else ""
    return words("on_nodes", what=text, nodes=named)


def _submission_row(each: Data) -> list[str]:
    failed = each["num_failed_tasks"]
    return [
        str(each["number"]),
        time_text(each["submitted"], "date"),
        f"{each['num_tasks']:,}",
        "-" if failed is None else f"{failed:,}",
        f"{each['num_shards']:,}",
    ]
