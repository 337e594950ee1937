"""The command ``overlap``: list the documents of a data set that contain text of an evaluation.

It reads the input, since that has the texts as they were encoded, and the offsets of documents. The hits of
each shard are written to one file, atomically. Its name has a hash of all that they depend on, so a second
call continues with the missing shards. The call that finds the files of all shards merges them into lists.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import heapq
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from preprocess.given_inputs import GivenInputs, add_given_inputs, blank_command, unblanked_documents
from preprocess.overlap_search import RULES, Search
from preprocess.plan.dividing import stamp_inputs
from preprocess.plan.inputs import find_inputs
from preprocess.read.documents import DocumentReader
from shardprep import files, publishing
from shardprep.console import Progress, counted, print_lines, quoted, say, shards_text
from shardprep.errors import BadInput, BrokenShard, NotFound, UsageError
from shardprep.files import FileStamp
from shardprep.format import names
from shardprep.format.data_folder import OVERLAP_FOLDER, DataFolder
from shardprep.format.plan import Cut, need_plan, ranges_between
from shardprep.format.plan_options import PlanOptions
from shardprep.option_flags import add_flags_of
from shardprep.output_folder import OutputFolder

_MARK = "overlap.json"  # shows that a folder is this command's
_HITS = "overlap.jsonl"
_NAMES = "names.txt"
_PAGE = "overlap.html"
_WRITTEN = re.compile(r"shard-[0-9]{5}\.[0-9a-f]{12}\.jsonl|overlap\.jsonl?|names\.txt|overlap\.html")
_HIT_SHA256 = re.compile(rf"[0-9a-f]{{{2 * names.DIGEST_BYTES}}}")
_MAX_HIT_BYTES = 1 << 20  # a hit has up to 2,000 characters of text, and names
_MAX_SHOWN = 50  # hits on the page
# Options of plan that say how to read the files of an evaluation.
_READ_OPTIONS = ("recursive", "doc", "encoding", "text_field", "text_template")


def overlap_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find the documents of a data set that contain text of an evaluation, and list them for 'plan "
        "--exclude' and 'blank --ids'. If it was stopped, run it again to continue with the missing shards. "
        "It reads the input, so shards need not be made."
    )
    add = parser.add_argument
    add("data_dir", metavar="DATA", type=Path, help="folder of the data set")
    text = "the evaluation: a file or folder of inputs as plan takes them, or a data set"
    add("--against", metavar="EVALS", type=Path, required=True, help=text)
    text = (
        "what both must share. gpt3: 13 words in a row. palm: 8 tokens in a row, and 70%% of the evaluation "
        "document. llama: 10 tokens in a row, after which 4 may differ (default: gpt3)"
    )
    add("--rule", choices=tuple(RULES), default="gpt3", help=text)
    add("--ngram", metavar="N", type=int, help="words or tokens in a row (default: the rule's)")
    add("--shards", metavar="IDS", help="search only these, such as 0-9,12 (default: all)")
    text = "folder of the lists (default: DATA/overlap)"
    add("--output", "--output_dir", metavar="OUT", dest="output", type=Path, help=text)
    add_given_inputs(parser)
    others = {item.name for item in dataclasses.fields(PlanOptions)} - {*_READ_OPTIONS}
    group = parser.add_argument_group("how to read EVALS, as for plan")
    add_flags_of(group, PlanOptions, exclude=others, is_grouped=False)


def overlap(args: argparse.Namespace) -> int:
    """Search the missing shards, and merge the hits once all shards are done. Return the exit code."""
    folder = DataFolder(args.data_dir)
    given = GivenInputs(args.transform, args.input_dir)
    plan = need_plan(folder)
    where = given.of(folder, plan)
    plan = plan.at(where.input_dir)
    chosen = names.chosen_shards(plan.num_shards, args.shards) or set(range(plan.num_shards))
    rule = RULES[args.rule]._replace(**{} if args.ngram is None else {"ngram": args.ngram})
    if rule.ngram < 2:
        raise UsageError.of_value("--ngram", rule.ngram, "2 or more")
    reader = DocumentReader.open_for_plan(folder, plan.options, where.transform)
    options = {name: vars(args)[name] for name in _READ_OPTIONS if name in args}
    evals = _read_evaluation(args.against, options, given)
    depends_on = repr((plan.plan_id, plan.options.blanked, rule, evals)).encode()
    key = hashlib.sha256(depends_on).hexdigest()[:12]
    out = OutputFolder(
        args.output or folder.path_of(OVERLAP_FOLDER),
        mark=_MARK,
        writable=_WRITTEN,
        may_be_link=args.output is not None,
    )
    out.claim(b'{"made_by": "shardprep overlap"}\n')
    out.remove_temporaries(older_than_s=publishing.STALE_AFTER_S)
    names_of_hits = [f"{names.shard_name(number)}.{key}.jsonl" for number in range(plan.num_shards)]

    def missing() -> list[int]:
        written = out.remembered()
        shard_ids = range(plan.num_shards)
        return [number for number in shard_ids if not out.is_as_written(names_of_hits[number], written)]

    todo = [number for number in missing() if number in chosen]
    if len(todo) < len(chosen):
        say(f"{len(chosen) - len(todo)} of {counted(len(chosen), 'shard')} are done already")
    if todo:
        search = Search(folder, plan, rule, evals)
        progress = Progress("looking", sum(plan.shard(number).num_bytes for number in todo))
        for number in todo:
            lines = []
            for documents in unblanked_documents(plan, folder, number, reader):
                lines += [json.dumps(hit, ensure_ascii=False) + "\n" for hit in search.hits_of(documents)]
                progress.add(documents.num_bytes)
            content = "".join(lines).encode("utf-8", "surrogatepass")
            out.publish(names_of_hits[number], content)
            out.remember(names_of_hits[number], FileStamp.of(content))
    left = names.id_ranges(missing())
    if left:
        print_lines(f"not done yet: {shards_text(left)}; the call that finishes the last writes the lists")
    else:
        settings = {"evaluation": args.against, "plan_id": plan.plan_id, **rule._asdict()}
        _merge(out, names_of_hits, blank_command(folder, out.path_of(_NAMES), where), settings)
    return 0


def _read_evaluation(path: Path, options: dict[str, Any], given: GivenInputs) -> list[tuple[str, bytes]]:
    """Return FILE:BYTE and text of each document of an evaluation: a file, a folder or a data set.

    ``options`` are the given options of plan. ``given`` has the function and the inputs of a data set.
    Raises NotFound, UsageError, or BadInput if it has no document.
    """
    if files.size_of_file(path) is None:
        raise NotFound(path=path, found="no such file or folder", expected="the documents of an evaluation")
    folder = DataFolder(path)
    if folder.status_of(names.PLAN_NAME) is not None:
        plan = need_plan(folder)
        if options:
            expected = "no such flag, as the plan of this data set says how to read its input"
            raise UsageError(path=path, found=f"--{min(options)}", expected=expected)
        where = given.of(folder, plan)
        given.check_all_used()
        plan = plan.at(where.input_dir)
        reader = DocumentReader.open_for_plan(folder, plan.options, where.transform)
        shards = (unblanked_documents(plan, folder, number, reader) for number in range(plan.num_shards))
        batches = itertools.chain.from_iterable(shards)
    else:
        given.check_all_used()
        read_options = PlanOptions(**options)
        root = path.parent
        paths = [path]
        if files.is_folder(path):
            root = path
            paths = find_inputs(path, read_options).paths
        inputs = [item.file for item in stamp_inputs(root, paths, read_options)]
        ranges = ranges_between(root, inputs, Cut(0, 0), Cut(len(inputs), 0))
        batches = itertools.chain(DocumentReader(read_options).read_ranges(list(ranges)))
    evals = list[tuple[str, bytes]]()
    bad = Counter[str]()
    for documents in batches:
        bad.update(one.reason for one in documents.bad)
        for text, offset in zip(documents.texts, documents.offsets.tolist(), strict=True):
            evals.append((f"{documents.input_path}:{offset}", text))
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in bad.most_common()) or "no document"
    if not evals:
        expected = "the documents of an evaluation"
        advice = "the field of their text is named by --text_field"
        raise BadInput(path=path, found=reasons, expected=expected, advice=advice)
    if bad:
        say(f"warning: {counted(bad.total(), 'document')} of the evaluation left out ({reasons})")
    return evals


def _hits_in(out: OutputFolder, name: str) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the lines of a file of hits with their values. Raises BrokenShard for what is no hit."""
    for line in out.lines(name, max_line_bytes=_MAX_HIT_BYTES):
        try:
            hit = json.loads(line)
            is_valid = _is_hit(hit)
        except (ValueError, LookupError, TypeError, RecursionError):
            is_valid = False
        if not is_valid:
            path = out.path_of(name)
            remedy = f"mv {quoted(path)} {quoted(f'{path}.damaged')}"
            advice = "move it away, and run this again"
            raise BrokenShard(path=path, found="not a hit", advice=advice, remedy=remedy)
        yield line, hit


def _is_hit(hit: Any) -> bool:
    """Return whether a value has the types of a hit, and a hash that adds no other line to the list."""
    has_texts = all(isinstance(hit[name], str) for name in ("document", "eval", "sha256", "text"))
    has_numbers = isinstance(hit["share"], (int, float)) and isinstance(hit["longest"], int)
    return has_texts and has_numbers and _HIT_SHA256.fullmatch(hit["sha256"]) is not None


def _merge(out: OutputFolder, names_of_hits: list[str], blank: str, settings: dict[str, object]) -> None:
    """Merge the files of all shards into the lists and a page. ``blank``: the next command.

    Raises BrokenShard, ReadWriteError.
    """
    listed: dict[str, None] = {}  # in order, each once
    names_path = out.path_of(_NAMES)
    last = ""
    evals = Counter[str]()
    sources = Counter[str]()
    with out.new_file(_HITS) as file:
        for name in names_of_hits:
            for line, hit in _hits_in(out, name):
                if hit["document"] != last:  # its hits are consecutive
                    last = hit["document"]
                    sources[names.source_of_path(last)] += 1
                evals[hit["eval"]] += 1
                listed[f"sha256:{hit['sha256']}\n"] = None
                file.write(line)
        file.sync()
        file.rename_into_place()
    out.publish(_NAMES, "".join(listed).encode())
    documents = counted(sources.total(), "document")
    of_evals = counted(len(evals), "evaluation document")
    summary = f"{documents} with text of {of_evals}: {counted(evals.total(), 'hit')}"
    hits_in_order = (hit for _, hit in _hits_in(out, _HITS))
    top = heapq.nlargest(_MAX_SHOWN, hits_in_order, key=lambda hit: hit["share"])
    columns = ("document", "eval", "share", "longest", "text")
    hits = [columns, *(tuple(str(hit[name])[:300] for name in columns) for hit in top)]
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Overlap with an evaluation</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto}}
td{{vertical-align:top;padding:.3em .6em;border-bottom:1px solid #ccc}}</style>
<h1>Overlap with an evaluation</h1><p>{summary}.
<h2>Documents by source</h2>{_table(sources.most_common())}
<h2>Largest overlaps</h2>{_table(hits)}
<h2>Evaluation documents that are found most often</h2><p>Text that is in many documents may be a common
phrase: look at the texts, and try a larger --ngram.{_table(evals.most_common(_MAX_SHOWN))}
<h2>Settings</h2>{_table(settings.items())}</html>
"""
    out.publish(_PAGE, page.encode("utf-8", "surrogatepass"))
    print_lines(f"{summary}; the lists and overlap.html are in {out}")
    print_lines(*(f"  {source}: {counted(count, 'document')}" for source, count in sources.most_common()))
    if listed:
        print_lines(f"next: {blank}  # or plan again with --exclude {quoted(names_path)}")


def _table(rows: Iterable[Iterable[object]]) -> str:
    """Return an HTML table with the cells escaped."""
    lines = ("<tr>" + "".join(f"<td>{escape(str(cell))}" for cell in row) + "\n" for row in rows)
    return f"<table>\n{''.join(lines)}</table>\n"
