"""Turns the plain data of a report into sections, in the words of one language."""

from __future__ import annotations

import datetime
import itertools
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from shardprep.console import short_bytes, short_number
from slurm.report.blocks import (
    Block,
    Columns,
    Commands,
    Facts,
    Note,
    Quotes,
    Report,
    Section,
    Table,
)
from slurm.report.words import Words, edge_labels, heights, percent, ratio, short_ids, time_text
from slurm.report.work_content import attempts_sections, osts_sections, use_section, work_sections

MOST_ROWS = 20  # of a table

Data = Mapping[str, Any]


def report_content(data: Data, words: Words) -> Report:
    """The whole report."""
    own = data["data"]
    sums = own["index"] if own["has_index_alone"] else own
    written = datetime.datetime.fromisoformat(data["written"])
    sections = [
        *([_sources(data, words)] if data["sources"] else []),
        *(_sections_of_manifests(data, words) if own["num_done"] else []),
        *attempts_sections(data, words),
        *work_sections(data, words),
        _again(data, words),
    ]
    return Report(
        language=words.language,
        title=data["folder"].rstrip("/").rpartition("/")[2] or data["folder"],
        subtitle=words(
            "written", when=time_text(written.timestamp(), "seconds and zone"), version=data["shardprep"]
        ),
        tiles=[
            (words("tokens"), short_number(sums["num_tokens"])),
            (words("documents"), short_number(sums["num_documents"])),
            (words("shards_done"), f"{own['num_done']:,} / {own['num_shards']:,}"),
            (words("input"), short_bytes(own["input_bytes"])),
            (words("on_disk"), short_bytes(sums["tar_bytes"] + sums["idx_bytes"])),
            (words("tokens_per_byte"), ratio(own["tokens_per_byte"])),
        ],
        notes=list(_notes(data, words)),
        sections=sections,
    )


def _sections_of_manifests(data: Data, words: Words) -> list[Section]:
    """What only manifests say; there is one at least."""
    return [
        _lengths(data, words),
        _left_out(data, words),
        _rows(data["data"], words),
        _shards(data, words),
        use_section(data, words),
        *osts_sections(data, words),
    ]


def _notes(data: Data, words: Words) -> Iterator[Note]:
    own = data["data"]
    if own["has_index_alone"]:
        yield Note(text=words("index_alone", shards=short_ids(own["without_manifest"])), is_warning=True)
        yield Note(text=words("index_says") + " " + words("bring_manifests"), is_warning=True)
    elif own["num_done"] < own["num_shards"]:
        missing = short_ids(own["missing"])
        text = words("unfinished", done=own["num_done"], total=own["num_shards"], missing=missing)
        yield Note(text=text, is_warning=True)
        if without := own["without_manifest"]:
            text = words("without_manifest", shards=short_ids(without)) + ". " + words("bring_manifests")
            yield Note(text=text, is_warning=True)
    elif not own["verified"]:
        yield Note(text=words("unverified", folder=shlex.quote(data["folder"])), is_warning=True)
    for name in ("not_read", "other_plan"):
        if own[name]:
            yield Note(text=words(name, shards=short_ids(own[name])), is_warning=True)
    if data["attempts"]["slurm_away"]:
        yield Note(text=words("slurm_away"))


def _sources(data: Data, words: Words) -> Section:
    """A row for each of the sources with the most tokens, one for the others, and the sum."""
    sources = data["sources"]
    shown = sources[:MOST_ROWS] if len(sources) > MOST_ROWS + 1 else sources
    rows = [
        [words("top_folder") if each["name"] == "." else each["name"], *_source_cells(each)] for each in shown
    ]
    others = sources[len(shown) :]
    sums = {name: sum(each[name] for each in others) for name in _SOURCE_NUMBERS}
    if others:
        rows.append([words("others", number=len(others)), *_source_cells(sums)])
    most = max((each["num_tokens"] for each in shown), default=0) or 1
    shares = [each["num_tokens"] / most for each in shown] + [None] * bool(others)
    columns = [
        words(name) for name in ("source", "tokens", "documents", "bytes", "tokens_per_byte", "left_out")
    ]
    table = Table(columns=columns, rows=rows, shares=shares)
    return Section(title=words("sources"), blocks=[table])


_SOURCE_NUMBERS = ("num_tokens", "num_documents", "num_bytes", "num_quarantined")


def _source_cells(source: Data) -> list[str]:
    num_bytes = source["num_bytes"]
    return [
        short_number(source["num_tokens"]),
        short_number(source["num_documents"]),
        short_bytes(num_bytes),
        ratio(source["num_tokens"] / num_bytes if num_bytes else None),
        short_number(source["num_quarantined"]),
    ]


def _lengths(data: Data, words: Words) -> Section:
    bins = list(itertools.dropwhile(lambda each: not each["num_documents"], data["lengths"]))
    own = data["data"]
    if not bins:
        return Section(title=words("lengths"), blocks=[Note(text=words("no_documents"))])
    names = [
        words("from_to_tokens", low=short_number(each["from"]), high=short_number(each["to"] - 1))
        for each in bins
    ]
    numbers = [each["num_documents"] for each in bins]
    chart = Columns(
        title=words("documents_by_tokens"),
        heights=heights(numbers),
        names=names,
        values=[words("n_documents", number=f"{number:,}") for number in numbers],
        labels=edge_labels([short_number(each["from"]) for each in bins] + [short_number(bins[-1]["to"])]),
    )
    half = next(
        each["to"]
        for each, below in zip(bins, itertools.accumulate(numbers), strict=True)
        if below * 2 >= sum(numbers)
    )
    mean = own["num_tokens"] / max(1, own["num_documents"])
    facts = [
        (words("mean_length"), words("n_tokens", number=short_number(round(mean)))),
        (words("median_length"), words("n_tokens", number=short_number(half))),
    ]
    return Section(title=words("lengths"), blocks=[chart, Facts(items=facts)])


def _left_out(data: Data, words: Words) -> Section:
    """What was lost, by reason, and some of it."""
    own, reasons = data["data"], data["left_out"]
    blocks: list[Block] = []
    all_documents = max(1, own["num_documents"] + own["num_left_out"])
    if reasons:
        rows = [
            [
                words.reason(each["reason"]),
                f"{each['num_documents']:,}",
                percent(each["num_documents"] / all_documents),
                _lost_bytes(each, words),
            ]
            for each in reasons
        ]
        columns = [words(name) for name in ("reason", "documents", "share", "bytes")]
        blocks.append(Table(columns=columns, rows=rows))
        if any(each["num_bytes_is_estimate"] for each in reasons):
            blocks.append(Note(text=words("estimate_note")))
    else:
        blocks.append(Note(text=words("nothing_left_out")))
    others = [("empty_lines", own["num_empty_lines"]), ("filtered", own["num_filtered"])]
    if facts := [(words(name), f"{number:,}") for name, number in others if number]:
        blocks.append(Facts(items=facts))
    if quotes := [_quote(each, example, words) for each in reasons for example in each["examples"]]:
        blocks.append(Quotes(items=quotes))
    return Section(title=words("left_out_title"), blocks=blocks)


def _lost_bytes(reason: Data, words: Words) -> str:
    if reason["num_bytes"] is None:
        return words("unknown")
    return ("~" if reason["num_bytes_is_estimate"] else "") + short_bytes(reason["num_bytes"])


def _quote(reason: Data, example: Data, words: Words) -> tuple[str, str, str]:
    place = words(f"unit_{example['unit']}", offset=example["offset"])
    size = short_bytes(example["num_bytes"])
    return (
        f"{example['input']}, {place}, {size}",
        f"{words.reason(reason['reason'])}: {example['detail']}",
        example["text"],
    )


def _rows(own: Data, words: Words) -> Section:
    if not own["seq_len"]:
        return Section(title=words("rows"), blocks=[Note(text=words("no_rows"))])
    stored = own["num_tokens"] + own["num_pad_tokens"]
    across = own["num_documents_across_rows"]
    facts = [
        (words("rows_of", seq_len=f"{own['seq_len']:,}"), f"{own['num_samples']:,}"),
        (words("packing"), str(own["pack"])),
        (
            words("padding"),
            f"{short_number(own['num_pad_tokens'])} ({percent(own['num_pad_tokens'] / max(1, stored))})",
        ),
        (words("across_rows"), f"{across:,} ({percent(across / max(1, own['num_documents']))})"),
    ]
    return Section(title=words("rows"), blocks=[Facts(items=facts)])


def _shards(data: Data, words: Words) -> Section:
    sizes = data["shard_sizes"]
    steps = sizes["histogram"]
    numbers = [each["num_shards"] for each in steps]
    chart = Columns(
        title=words("shards_by_bytes"),
        heights=heights(numbers),
        names=[f"{short_bytes(each['from'])} - {short_bytes(each['to'])}" for each in steps],
        values=[words("n_shards", number=f"{number:,}") for number in numbers],
        labels=edge_labels([short_bytes(each["from"]) for each in steps] + [short_bytes(steps[-1]["to"])]),
    )
    spreads = [
        (words("tar_size"), sizes["tar_bytes"], short_bytes),
        (words("tokens"), sizes["num_tokens"], short_number),
        (words("time_per_shard"), data["work"]["shard_s"], words.time),
    ]
    columns = ["", *(words(name) for name in ("least", "median", "most"))]
    rows = [[name, *(show(each[key]) for key in ("least", "median", "most"))] for name, each, show in spreads]
    table = Table(columns=columns, rows=rows)
    is_one = sizes["tar_bytes"]["least"] == sizes["tar_bytes"]["most"]
    return Section(title=words("shards"), blocks=[table] if is_one else [chart, table])


def _again(data: Data, words: Words) -> Section:
    again, own = data["again"], data["data"]
    tokenizer = own["tokenizer"]
    facts = [
        (words("plan"), again["plan_id"][:12]),
        (words("input_dir"), again["input_dir"]),
        (words("num_inputs"), f"{own['num_inputs']:,} ({short_bytes(own['planned_bytes'])})"),
        (
            words("tokenizer"),
            words(
                "vocab",
                model=tokenizer["model_id"],
                number=f"{tokenizer['vocab_size']:,}",
                sha=again["tokenizer_sha256"][:12],
            ),
        ),
        (words("record"), own["record"]),
    ]
    if again["text_versions"]:
        facts.append((words("text_versions"), again["text_versions"]))
    for name, found in again["versions"].items():
        if found:
            facts.append((words(f"version_{name}"), _versions(found, words)))
    note = Note(text=words("again_note", plan_id=again["plan_id"][:12]))
    blocks: list[Block] = [note, Commands(lines=again["commands"]), Facts(items=facts)]
    return Section(title=words("again"), blocks=blocks, is_wide=True)


def _versions(found: Mapping[str, int], words: Words) -> str:
    """Versions with the number of shards that each made; the number only where there are several."""
    if len(found) == 1:
        return next(iter(found))
    shown = list(found.items())[:MOST_ROWS]
    return ", ".join(words("version_of", version=version, number=number) for version, number in shown)
