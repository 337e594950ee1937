"""``shardprep overlap DATA --against EVALS``: find the documents that hold text of an evaluation.

DATA's input is read, as ``blank`` and ``plan --exclude`` read it, which take the lists: it tells texts as
they were encoded, and where each document begins, whatever records and rows the shards have.

The hits of each shard become one file, which appears whole. Its name has a hash of what they depend on, so a
second call makes what is missing. The call that finds the files of all shards merges them into the lists.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import heapq
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from preprocess.make.engines import TokenBatch, load_tokenizer
from preprocess.make.worker import load_engine
from preprocess.overlap.duplicates import add_input_flags, documents_left
from preprocess.overlap.ngrams import EvalIndex, find_hits, numbered_words, words_of
from preprocess.plan.inputs import find_inputs, stamp_inputs
from preprocess.read.documents import Documents, read_documents
from preprocess.read.transform import transform_of
from shardprep.command_line import add_flags_of
from shardprep.console import Progress, counted, print_lines, quoted, say
from shardprep.errors import BadInput, BrokenShard, NotFound, UsageError
from shardprep.files import (
    PublishedFile,
    is_folder,
    make_folder,
    publish_bytes,
    read_lines,
    size_of_file,
)
from shardprep.format.names import TOKENIZER_DIR, TOKENIZER_FILE, chosen_shards, shard_name, source_of_path
from shardprep.format.plan import ByteRange, Plan, PlanOptions, check_tokenizer_files, need_plan, read_plan

_MOST_TEXT_CHARS = 2000  # of a hit
_MOST_SHOWN = 50  # hits on the page
# The options of plan that say how the files of an evaluation are read.
_READ_OPTIONS = ("recursive", "doc", "encoding", "text_field", "text_template")


class Rule(NamedTuple):
    """A document overlaps if it shares ``ngram`` units in a row with an evaluation document."""

    unit: str  # words or tokens
    ngram: int
    num_gaps: int = 0  # units behind the first n-gram of a shared run that may differ
    min_share: float = 0.0  # of the evaluation document's units, that the document must hold


RULES = {
    # Brown et al. 2020, arXiv 2005.14165, appendix C.
    "gpt3": Rule("words", 13),
    # Chowdhery et al. 2022, arXiv 2204.02311, section 8.
    "palm": Rule("tokens", 8, min_share=0.7),
    # Touvron et al. 2023, arXiv 2307.09288, appendix A.6.
    "llama": Rule("tokens", 10, num_gaps=4),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find the documents of a data set that hold text of an evaluation, and list them as 'plan --exclude' "
        "and 'blank --ids' take it. Run it again after it was stopped: it goes on with what is missing. The "
        "input is read: shards need not be made."
    )
    add = parser.add_argument
    add("data_dir", metavar="DATA", type=Path, help="folder of the data set")
    text = "the evaluation: a file or folder of inputs as plan takes them, or a data set"
    add("--against", metavar="EVALS", type=Path, required=True, help=text)
    text = (
        "what both must have. gpt3: 13 words in a row. palm: 8 tokens, and 70%% of the evaluation document "
        "in all. llama: 10 tokens, and 4 behind them may differ (default: gpt3)"
    )
    add("--rule", choices=tuple(RULES), default="gpt3", help=text)
    add("--ngram", metavar="N", type=int, help="words or tokens in a row (default: the rule's)")
    add("--shards", metavar="IDS", help="look into these only, such as 0-9,12 (default: all)")
    text = "folder of the lists (default: DATA/overlap)"
    add("--output", "--output_dir", metavar="OUT", dest="output", type=Path, help=text)
    add_input_flags(parser)
    others = {item.name for item in dataclasses.fields(PlanOptions)} - {*_READ_OPTIONS}
    add_flags_of(parser.add_argument_group("how EVALS is read, as by plan"), PlanOptions, but=others)


def overlap(args: argparse.Namespace) -> int:
    """``overlap DATA --against EVALS``: make the files that are missing, and merge them if all are there."""
    folder: Path = args.data_dir
    plan = need_plan(folder).at(args.input_dir)
    chosen = chosen_shards(plan.num_shards, args.shards)
    wanted = range(plan.num_shards) if chosen is None else sorted(chosen)
    rule = RULES[args.rule]._replace(**{} if args.ngram is None else {"ngram": args.ngram})
    if rule.ngram < 2:
        raise UsageError.of_value("--ngram", rule.ngram, "2 or more")
    transform = transform_of(plan.options, args.transform)
    read_options = {name: vars(args)[name] for name in _READ_OPTIONS if name in vars(args)}
    evals = read_evaluation(args.against, read_options)
    settings = {"evaluation": args.against, "plan_id": plan.plan_id, **rule._asdict()}
    depends_on = repr((plan.plan_id, plan.options.blanked, rule, evals)).encode()
    key, out = hashlib.sha256(depends_on).hexdigest()[:12], args.output or folder / "overlap"
    paths = [out / f"{shard_name(number)}.{key}.jsonl" for number in range(plan.num_shards)]
    todo = [number for number in wanted if size_of_file(paths[number]) is None]
    if len(todo) < len(wanted):
        say(f"{len(wanted) - len(todo)} of {counted(len(wanted), 'shard')} are done already")
    if todo:
        search = Search(folder, plan, rule, evals)
        make_folder(out, parents=True)
        progress = Progress("looking", sum(plan.shard(number).num_bytes for number in todo))
        for number in todo:
            lines = []
            for documents in documents_left(plan, folder, number, transform):
                lines += [json.dumps(hit, ensure_ascii=False) + "\n" for hit in search.hits_of(documents)]
                progress.add(documents.num_bytes)
            publish_bytes(paths[number], "".join(lines).encode("utf-8", "surrogatepass"))
    # From the next shard on: of a job array's shards it is the one that is missing most likely.
    others = [*range(wanted[-1] + 1, plan.num_shards), *range(wanted[-1])]
    missing = next((number for number in others if size_of_file(paths[number]) is None), None)
    if missing is None:
        _merge(out, paths, folder, settings)
    else:
        print_lines(f"shard {missing:05d} is not done yet; the call that does the last one writes the lists")
    return 0


def read_evaluation(path: Path, options: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Return FILE:BYTE and text of each document of an evaluation: a file, a folder or a data set.

    ``options``: of plan, those that were given. Raises NotFound, UsageError, BadInput where there is no
    document, and what reading raises.
    """
    if size_of_file(path) is None:
        raise NotFound(path=path, found="no such file or folder", expected="the documents of an evaluation")
    plan = read_plan(path) if is_folder(path) else None
    if plan is not None:
        if options:
            expected = "no such flag, as this is a data set, whose plan says how its input is read"
            raise UsageError(path=path, found=f"--{min(options)}", expected=expected)
        transform, names = transform_of(plan.options, None), [item.path for item in plan.inputs]
        shards = (documents_left(plan, path, number, transform) for number in range(plan.num_shards))
        batches = itertools.chain.from_iterable(shards)
    else:
        read_options, folder, paths = PlanOptions(**options), path.parent, [path]
        if is_folder(path):
            folder, paths = path, find_inputs(path, read_options).paths
        inputs = [item.file for item in stamp_inputs(folder, paths, read_options)]
        names = [item.path for item in inputs]
        ranges = [
            ByteRange(input_number=number, path=folder / item.path, start=0, end=item.num_bytes)
            for number, item in enumerate(inputs)
        ]
        batches = itertools.chain(read_documents(ranges, read_options))
    evals, bad = list[tuple[str, bytes]](), Counter[str]()
    for documents in batches:
        bad.update(one.reason for one in documents.bad)
        for text, offset in zip(documents.texts, documents.offsets.tolist(), strict=True):
            evals.append((f"{names[documents.input_number]}:{offset}", text))
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in bad.most_common()) or "no document"
    if not evals:
        expected = "the documents of an evaluation; the field of their text is named by --text_field"
        raise BadInput(path=path, found=reasons, expected=expected)
    if bad:
        say(f"warning: {bad.total():,} documents of the evaluation cannot be read ({reasons})")
    return evals


class Search:
    """Finds the hits of documents. Raises BadInput where no document of the evaluation is long enough."""

    def __init__(self, folder: Path, plan: Plan, rule: Rule, evals: list[tuple[str, bytes]]) -> None:
        self._rule, self._plan = rule, plan
        self._eval_names = [name for name, _ in evals]
        self._number_of = defaultdict[str, int](itertools.count(1).__next__)  # of a word
        if rule.unit == "tokens":
            check_tokenizer_files(folder, plan.tokenizer_files)
            self._engine = load_engine(plan, folder, "auto", say).bare()
            self._tokenizer = load_tokenizer(folder / TOKENIZER_DIR / TOKENIZER_FILE)
        _, units = self._units_of([text for _, text in evals], may_add=True)
        lengths = np.diff(units.offsets)
        num_short, num_evals = int((lengths < rule.ngram).sum()), counted(len(lengths), "evaluation document")
        if num_short == len(lengths):
            found = f"at most {lengths.max()} {rule.unit} in {num_evals}"
            raise BadInput(found=found, expected=f"{rule.ngram}, or a lesser --ngram", remedy="--ngram")
        self._index = EvalIndex(units, rule.ngram)
        short = f"{num_short} of fewer than {rule.ngram} {rule.unit} cannot be found"
        say(f"{num_evals}, {self._index.num_ngrams:,} different n-grams; {short}")

    def _units_of(self, texts: Sequence[bytes], *, may_add: bool = False) -> tuple[list[Any], TokenBatch]:
        """Return the units of texts, themselves and as numbers."""
        if self._rule.unit == "tokens":
            tokens = self._engine.encode(texts)
            return tokens.documents(), tokens
        words = words_of(text.decode() for text in texts)
        return words, numbered_words(words, self._number_of, may_add=may_add)

    def hits_of(self, documents: Documents) -> Iterator[dict[str, Any]]:
        """Yield the hits of a batch, as overlap.jsonl has them."""
        rule, (units_of, units) = self._rule, self._units_of(documents.texts)
        name = self._plan.inputs[documents.input_number].path
        for hit in find_hits(units, self._index, num_gaps=rule.num_gaps, min_share=rule.min_share):
            run = units_of[hit.document][hit.begin : hit.begin + hit.num_units]
            is_words = rule.unit == "words"
            text = " ".join(run) if is_words else self._tokenizer.decode(run, skip_special_tokens=False)
            document = documents.only(np.array([hit.document]))
            yield {
                "document": f"{name}:{document.offsets[0]}",
                "id": document.columns["id"][0] if "id" in document.columns else None,
                "sha256": document.digests()[0].tobytes().hex(),
                "eval": self._eval_names[hit.eval_document],
                "share": round(hit.share, 4),
                "longest": hit.num_units,
                "text": text[:_MOST_TEXT_CHARS],
            }


def _merge(out: Path, paths: list[Path], data_dir: Path, settings: dict[str, Any]) -> None:
    """Write the lists, of the files of all shards. Raises BrokenShard, ReadWriteError."""
    names: dict[str, None] = {}  # in order, each once
    merged, names_path, num_hits, last = out / "overlap.jsonl", out / "names.txt", 0, ""
    evals, sources = Counter[str](), Counter[str]()
    with PublishedFile(merged) as file:
        for path in paths:
            try:
                for line in read_lines(path):
                    hit = json.loads(line)
                    num_hits += 1
                    if hit["document"] != last:  # its hits follow each other
                        last = hit["document"]
                        sources[source_of_path(last)] += 1
                    evals[hit["eval"]] += 1
                    names[f"sha256:{hit['sha256']}\n"] = None
                    file.write(line)
            except (ValueError, LookupError, TypeError):
                raise BrokenShard(path=path, found="no hit", remedy=f"rm {quoted(path)}") from None
        file.sync()
        file.publish()
    publish_bytes(names_path, "".join(names).encode())
    documents, of_evals = counted(sources.total(), "document"), counted(len(evals), "evaluation document")
    found = f"{documents} hold text of {of_evals}: {counted(num_hits, 'hit')}"
    largest = heapq.nlargest(_MOST_SHOWN, map(json.loads, read_lines(merged)), key=lambda hit: hit["share"])
    columns = ("document", "eval", "share", "longest", "text")
    hits = [columns, *(tuple(str(hit[name])[:300] for name in columns) for hit in largest)]
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Overlap with an evaluation</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto}}
td{{vertical-align:top;padding:.3em .6em;border-bottom:1px solid #ccc}}</style>
<h1>Overlap with an evaluation</h1><p>{found}.
<h2>Documents by source</h2>{_table(sources.most_common())}
<h2>Largest overlaps</h2>{_table(hits)}
<h2>Evaluation documents that are found most often</h2><p>What many documents hold may be a phrase that all
use: look at the texts, and give a larger --ngram.{_table(evals.most_common(_MOST_SHOWN))}
<h2>Settings</h2>{_table(settings.items())}</html>
"""
    publish_bytes(out / "overlap.html", page.encode("utf-8", "surrogatepass"))
    print_lines(f"{found}; the lists and overlap.html are in {out}")
    print_lines(*(f"  {source}: {count:,} documents" for source, count in sources.most_common()))
    if names:
        blank = f"shardprep blank {quoted(data_dir)} --ids {quoted(names_path)} --output NEW"
        print_lines(f"next: {blank}  # or plan anew: --exclude {quoted(names_path)}")


def _table(rows: Iterable[Iterable[object]]) -> str:
    """Return a table of HTML. Scripts in its texts do not run."""
    lines = ("<tr>" + "".join(f"<td>{escape(str(cell))}" for cell in row) + "\n" for row in rows)
    return f"<table>\n{''.join(lines)}</table>\n"
