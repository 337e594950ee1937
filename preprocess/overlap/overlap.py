"""``shardprep overlap DATA --against EVALS``: find the documents that hold text of an evaluation.

Each shard is read once, and its hits become one file, which appears whole. Its first line says of which
shard, rule and evaluation it is, so a second call makes what is missing. The call that finds all files there
merges them: into overlap.jsonl, names.txt for ``plan --exclude`` and ``blank --ids``, and a page.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np

from preprocess.make.worker import load_engine
from preprocess.overlap.documents import ShardDocuments, TokenTexts
from preprocess.overlap.evals import READ_OPTIONS, EvalDocument, read_evals
from preprocess.overlap.ngrams import MOST_NGRAM, EvalIndex, find_hits, tokens_as_units, words_as_units
from shardprep.command_line import add_flags_of
from shardprep.console import Progress, counted, print_lines, quoted, say
from shardprep.errors import BadInput, BrokenShard, Refused, UsageError
from shardprep.files import (
    STALE_AFTER_S,
    PublishedFile,
    make_folder,
    publish_bytes,
    read_lines,
    remove_temporaries,
    size_of_file,
)
from shardprep.format.documents import name_of_place
from shardprep.format.index import ShardSamples
from shardprep.format.manifest import Manifest, check_done, read_findings
from shardprep.format.names import chosen_shards, load_json, shard_name
from shardprep.format.options import PlanOptions
from shardprep.format.plan import Plan, check_tokenizer_files, need_plan

_FORMAT = "shardprep-overlap"
_MOST_TEXT_CHARS = 2000  # of a hit
_MOST_SHOWN = 50  # hits on the page


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A document overlaps if it shares ``ngram`` units in a row with an evaluation document."""

    unit: Literal["words", "tokens"]
    ngram: int
    num_gaps: int = 0  # units behind the first n-gram of a shared run that may differ
    min_share: float = 0.0  # of the evaluation document's units, that the document must hold


RULES = {
    # Brown et al. 2020, arXiv 2005.14165, appendix C.
    "gpt3": Rule(unit="words", ngram=13),
    # Chowdhery et al. 2022, arXiv 2204.02311, section 8.
    "palm": Rule(unit="tokens", ngram=8, min_share=0.7),
    # Touvron et al. 2023, arXiv 2307.09288, appendix A.6.
    "llama": Rule(unit="tokens", ngram=10, num_gaps=4),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find the documents of a data set that hold text of an evaluation, and list them as 'plan --exclude' "
        "and 'blank --ids' take it. Run it again after it was stopped: it goes on with what is missing."
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
    add("--unit", choices=("words", "tokens"), help="what is compared (default: the rule's)")
    text = "least part of an evaluation document that a document must hold, 0 to 1 (default: the rule's)"
    add("--min_share", metavar="F", type=float, help=text)
    add("--shards", metavar="IDS", help="look into these only, such as 0-9,12 (default: all)")
    text = "folder of the lists; a new one for other settings (default: DATA/overlap)"
    add("--output", "--output_dir", metavar="OUT", dest="output", type=Path, help=text)
    others = {item.name for item in dataclasses.fields(PlanOptions)} - {*READ_OPTIONS}
    add_flags_of(parser.add_argument_group("how EVALS is read, as by plan"), PlanOptions, but=others)


def overlap(args: argparse.Namespace) -> int:
    """``overlap DATA --against EVALS``: make the files that are missing, and merge them if all are there."""
    folder: Path = args.data_dir
    plan = need_plan(folder)
    chosen = chosen_shards(plan.num_shards, args.shards)
    wanted = range(plan.num_shards) if chosen is None else sorted(chosen)
    rule = _rule_of(args)
    check_tokenizer_files(folder, plan.tokenizer_files)
    findings = read_findings(folder, plan.plan_id)
    manifests = [check_done(folder, number, plan.plan_id, findings) for number in wanted]
    evals = read_evals(args.against, {name: vars(args)[name] for name in READ_OPTIONS if name in vars(args)})
    out = Output(args.output or folder / "overlap", plan, rule, evals)
    todo = [manifest for manifest in manifests if not out.is_done(manifest)]
    if len(todo) < len(wanted):
        say(f"{len(wanted) - len(todo)} of {counted(len(wanted), 'shard')} are done already")
    if todo:
        search = Search(folder, plan, rule, evals)
        make_folder(out.folder, parents=True)
        progress = Progress("looking", sum(item.counts.num_tokens for item in todo), unit="tokens")
        for manifest in todo:
            out.publish(manifest, search.hits_of(manifest, progress))
    # From the next shard on: of a job array's shards it is the one that is missing most likely.
    others = [*range(wanted[-1] + 1, plan.num_shards), *range(wanted[-1])]
    missing = next((number for number in others if size_of_file(out.path(number)) is None), None)
    if missing is None:
        out.merge(folder)
    else:
        print_lines(f"shard {missing:05d} is not done yet; the call that does the last one writes the lists")
    return 0


def _rule_of(args: argparse.Namespace) -> Rule:
    given = {name: vars(args)[name] for name in ("ngram", "unit", "min_share")}
    given = {name: value for name, value in given.items() if value is not None}
    rule = dataclasses.replace(RULES[args.rule], **given)
    if not 2 <= rule.ngram <= MOST_NGRAM:
        raise UsageError.of_value("--ngram", rule.ngram, f"2 to {MOST_NGRAM}")
    if not 0 <= rule.min_share <= 1:
        raise UsageError.of_value("--min_share", rule.min_share, "0 to 1")
    return rule


class Search:
    """Finds the hits of shards. Raises BadInput where no document of the evaluation is long enough."""

    def __init__(self, folder: Path, plan: Plan, rule: Rule, evals: list[EvalDocument]) -> None:
        self._folder, self._plan, self._rule, self._evals = folder, plan, rule, evals
        self._texts = TokenTexts(folder, plan)
        if rule.unit == "words":
            units = words_as_units([each.text for each in evals])
        else:
            tokens = load_engine(plan, folder, "auto", say).bare().encode_texts(each.text for each in evals)
            units = tokens_as_units(tokens.ids, tokens.offsets)
        lengths = np.diff(units.offsets)
        num_short, num_evals = int((lengths < rule.ngram).sum()), counted(len(lengths), "evaluation document")
        found = f"{num_short} of {num_evals} have fewer than {rule.ngram} {rule.unit}"
        if num_short == len(lengths):
            longest = f"the longest has {lengths.max()}"
            raise BadInput(f"{found}: {longest}; give a lesser --ngram", found=longest, remedy="--ngram")
        if num_short:
            say(f"note: {found} and cannot be found")
        self._index = EvalIndex(units, rule.ngram)
        say(f"{num_evals}, {len(self._index):,} different n-grams")

    def hits_of(self, manifest: Manifest, progress: Progress) -> list[dict[str, Any]]:
        """Return the hits of a shard, in the order of its samples, as overlap.jsonl has them."""
        rule, hits = self._rule, list[dict[str, Any]]()
        with ShardSamples(self._folder, self._plan.spec, manifest.shard_id) as samples:
            documents = ShardDocuments(self._folder, self._plan, manifest, samples)
            for block in documents.blocks():
                if rule.unit == "words":
                    units = words_as_units(self._texts.texts(block.ids, block.offsets))
                else:
                    units = tokens_as_units(block.ids, block.offsets)
                for hit in find_hits(units, self._index, num_gaps=rule.num_gaps, min_share=rule.min_share):
                    begin, end = block.offsets[hit.document : hit.document + 2]
                    names = documents.names(block.first + hit.document)
                    names["sha256"] = names["sha256"] or self._texts.digest(block.ids[begin:end].tolist())
                    run = units.spell(hit.begin, hit.begin + hit.num_units)
                    text = " ".join(run) if rule.unit == "words" else self._texts.text(list(run))
                    evaluated = self._evals[hit.eval_document]
                    hits.append(
                        {
                            **names,
                            "eval": {"name": evaluated.name, "place": evaluated.place},
                            "share": round(hit.share, 4),
                            "longest": hit.num_units,
                            "unit": rule.unit,
                            "text": text[:_MOST_TEXT_CHARS],
                        }
                    )
                progress.add(len(block.ids))
        return hits


def _sha256_of(evals: list[EvalDocument]) -> str:
    digest = hashlib.sha256()
    for each in evals:
        digest.update(f"{len(each.name)} {len(each.text)} {each.name}{each.text}".encode())
    return digest.hexdigest()


class Output:
    """The folder of the lists."""

    def __init__(self, folder: Path, plan: Plan, rule: Rule, evals: list[EvalDocument]) -> None:
        self.folder, self._num_shards = folder, plan.num_shards
        self._settings = {"plan_id": plan.plan_id, "evals_sha256": _sha256_of(evals), **vars(rule)}

    def path(self, shard_id: int) -> Path:
        return self.folder / f"{shard_name(shard_id)}.jsonl"

    def is_done(self, manifest: Manifest) -> bool:
        """Return whether the file of a shard is there, of this tar. Raises Refused for other settings."""
        if size_of_file(self.path(manifest.shard_id)) is None:
            return False
        head, _ = self._read(manifest.shard_id)
        return bool(head["tar_sha256"] == manifest.tar.sha256)

    def publish(self, manifest: Manifest, hits: list[dict[str, Any]]) -> None:
        """Write the file of a shard. Raises CannotWrite, ReadWriteError."""
        head = {
            "format": _FORMAT,
            "shard": manifest.shard_id,
            **self._settings,
            "tar_sha256": manifest.tar.sha256,
            "num_documents": manifest.counts.num_documents,
        }
        lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in (head, *hits)]
        publish_bytes(self.path(manifest.shard_id), "".join(lines).encode("utf-8", "surrogatepass"))

    def _read(self, shard_id: int) -> tuple[dict[str, Any], Iterator[bytes]]:
        """Return the first line of a shard's file, and the others. Raises BrokenShard, Refused."""
        path, head = self.path(shard_id), None
        lines = read_lines(path)
        with contextlib.suppress(ValueError):
            head = load_json(next(lines, b""))
        if not isinstance(head, dict) or (head.get("format"), head.get("shard")) != (_FORMAT, shard_id):
            raise self._damaged(shard_id)
        if others := [name for name, value in self._settings.items() if head.get(name) != value]:
            raise Refused(
                f"{path} was made with other settings ({', '.join(others)}); give another folder as --output",
                path=path,
                found=", ".join(others),
                remedy="--output",
            )
        return head, lines

    def _damaged(self, shard_id: int) -> BrokenShard:
        path, expected = self.path(shard_id), f"the hits of shard {shard_id:05d}"
        return BrokenShard(path=path, found="something else", expected=expected, remedy=f"rm {quoted(path)}")

    def merge(self, data_dir: Path) -> None:
        """Write the lists, of the files of all shards. Raises BrokenShard, Refused, ReadWriteError."""
        names, names_path = dict[str, None](), self.folder / "names.txt"
        num_documents = num_overlapping = num_hits = num_unnamed = 0
        last, evals = "", Counter[str]()
        largest: list[tuple[float, int, dict[str, Any]]] = []  # a heap
        with PublishedFile(self.folder / "overlap.jsonl") as file:
            for shard_id in range(self._num_shards):
                head, lines = self._read(shard_id)
                try:
                    num_documents += head["num_documents"]
                    for line in lines:
                        hit = json.loads(line)
                        num_hits += 1
                        num_overlapping += hit["document"] != last  # its hits follow each other
                        last = hit["document"]
                        evals[hit["eval"]["name"]] += 1
                        heapq.heappush(largest, (hit["share"], -num_hits, hit))
                        if len(largest) > _MOST_SHOWN:
                            heapq.heappop(largest)
                        if hit["sha256"]:
                            names[f"sha256:{hit['sha256']}\n"] = None
                        elif place := hit["place"]:
                            names[name_of_place(place["file"], place["byte"]) + "\n"] = None
                        else:
                            num_unnamed += 1
                        file.write(line)
                except (ValueError, LookupError, TypeError):
                    raise self._damaged(shard_id) from None
            file.sync()
            file.publish()
        publish_bytes(names_path, "".join(names).encode())
        found = (
            f"{num_overlapping:,} of {counted(num_documents, 'document')} hold text of "
            f"{counted(len(evals), 'evaluation document')}: {counted(num_hits, 'hit')}"
        )
        hits = [hit for *_, hit in sorted(largest, key=lambda item: item[:2], reverse=True)]
        publish_bytes(self.folder / "overlap.html", _page(found, hits, evals, self._settings).encode())
        # Of calls that were killed: what a living one would write is there, unless it merges, too.
        remove_temporaries(self.folder, *map(shard_name, range(self._num_shards)), older_than_s=0)
        remove_temporaries(self.folder, "overlap", "names", older_than_s=STALE_AFTER_S)
        print_lines(f"{found}; the lists and overlap.html are in {self.folder}")
        if num_unnamed:
            unnamed = counted(num_unnamed, "hit")
            say(f"warning: {unnamed} of documents that no list can name; plan with --digests")
        if names:
            blank = f"shardprep blank {quoted(data_dir)} --ids {quoted(names_path)} --output NEW"
            print_lines(f"next: {blank}  # or plan anew: --exclude {quoted(names_path)}")


_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Overlap with an evaluation</title>
<style>body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto}
td,th{text-align:left;vertical-align:top;padding:.3em .6em;border-bottom:1px solid #ccc}</style>
"""


def _page(found: str, hits: list[dict[str, Any]], evals: Counter[str], settings: dict[str, Any]) -> str:
    """Return a page of HTML, without scripts: the largest hits, and which evaluation documents are common."""
    columns = [("document, for peek", "evaluation document", "share", "longest", "text")]
    rows = [
        (hit["document"], hit["eval"]["name"], f"{hit['share']:.0%}", hit["longest"], hit["text"][:300])
        for hit in hits
    ]
    return (
        f"{_HEAD}<h1>Overlap with an evaluation</h1><p>{found}.<h2>Largest overlaps</h2>"
        f"{_table([*columns, *rows])}<h2>Evaluation documents that are found most often</h2><p>What many "
        "documents hold may be a phrase that all use: look at the texts, and give a larger --min_share."
        f"{_table(evals.most_common(_MOST_SHOWN))}<h2>Settings</h2>{_table(settings.items())}</html>\n"
    )


def _table(rows: Iterable[Iterable[object]]) -> str:
    lines = ("<tr>" + "".join(f"<td>{escape(str(cell))}" for cell in row) + "\n" for row in rows)
    return f"<table>\n{''.join(lines)}</table>\n"
