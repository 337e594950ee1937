"""``shardprep overlap DATA --against EVALS``: find the documents that hold text of an evaluation.

Each shard is read once, and its hits become one file, which appears whole. Its first line says of what shard,
rule and evaluation it is, so a second call makes what is missing, and the call after which nothing is missing
merges all files: into ``overlap.jsonl``, ``names.txt`` for ``plan --exclude`` and ``blank --ids``, and a page.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from preprocess.make.worker import load_engine
from preprocess.overlap.evals import READ_OPTIONS, Evals, read_evals
from preprocess.overlap.ngrams import MOST_NGRAM, EvalIndex, Units, find_hits
from preprocess.overlap.page import Summary
from preprocess.overlap.rules import RULES, Rule
from preprocess.overlap.shard_documents import Block, ShardDocuments
from preprocess.overlap.token_texts import TokenTexts
from preprocess.overlap.units import tokens_as_units, words_as_units
from shardprep.command_line import add_flags_of
from shardprep.console import Progress, counted, print_lines, quoted, say
from shardprep.errors import BadInput, BrokenShard, Refused, UsageError
from shardprep.files import PublishedFile, make_folder, publish_bytes, read_lines, size_of_file, sync_folder
from shardprep.format.idx import ShardSamples
from shardprep.format.json_files import load_json
from shardprep.format.manifest import Manifest, check_done, read_findings
from shardprep.format.names import ids_of_ranges, shard_name
from shardprep.format.options import PlanOptions
from shardprep.format.plan import Plan, check_tokenizer_files, need_plan

_FORMAT = "shardprep-overlap"
_MOST_TEXT_CHARS = 2000  # of a hit


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find the documents of a data set that hold text of an evaluation, and write lists that "
        "'plan --exclude' and 'blank --ids' take. Run it again after it was stopped."
    )
    add = parser.add_argument
    add("data_dir", metavar="DATA", type=Path, help="folder of the data set")
    text = "the evaluation: a file or a folder that 'plan' reads, or a data set"
    add("--against", metavar="EVALS", type=Path, required=True, help=text)
    text = (
        "gpt3: 13 words. palm: 8 tokens, and 70 %% of an evaluation document. llama: 10 tokens, behind which "
        "4 may differ (default: gpt3)"
    )
    add("--rule", choices=tuple(RULES), default="gpt3", help=text)
    add("--ngram", metavar="N", type=int, help="units in a row that both must have (default: the rule's)")
    add("--unit", choices=("words", "tokens"), help="what is compared (default: the rule's)")
    text = "report only pairs that share this part of the evaluation document, 0 to 1 (default: the rule's)"
    add("--min_share", metavar="F", type=float, help=text)
    add("--shards", metavar="IDS", help="look through these only, such as 0-9,12 (default: all)")
    text = "folder of the lists (default: DATA/overlap)"
    add("--output", metavar="OUT", type=Path, help=text)
    reading = parser.add_argument_group("how EVALS is read, as by plan")
    others = {item.name for item in dataclasses.fields(PlanOptions)} - {*READ_OPTIONS}
    add_flags_of(reading, PlanOptions, but=others)


def overlap(args: argparse.Namespace) -> int:
    """Make the files that are missing, and merge them when all are there."""
    folder: Path = args.data_dir
    plan = need_plan(folder)
    wanted: Sequence[int] = range(plan.num_shards)
    if args.shards is not None:
        try:
            wanted = sorted(set(ids_of_ranges(args.shards, end=plan.num_shards)))
        except ValueError:
            expected = f"ids of 0 to {plan.num_shards - 1}, such as {plan.num_shards - 1}"
            raise UsageError.of_value("--shards", args.shards, expected) from None
    rule = _rule_of(args)
    check_tokenizer_files(folder, plan.tokenizer_files)
    findings = read_findings(folder, plan.plan_id)
    manifests = {number: check_done(folder, number, plan.plan_id, findings) for number in wanted}
    evals = read_evals(args.against, {name: vars(args)[name] for name in READ_OPTIONS if name in vars(args)})
    out = Output(args.output or folder / "overlap", folder, plan, rule, evals)
    todo = [number for number in wanted if not out.is_done(number, manifests[number])]
    if len(todo) < len(wanted):
        say(f"{len(wanted) - len(todo)} of {counted(len(wanted), 'shard')} are done already")
    if todo:
        make_folder(out.folder, parents=True)
        search = Search(folder, plan, rule, evals)
        progress = Progress(
            "looking", sum(manifests[number].counts.num_tokens for number in todo), unit="tokens"
        )
        for number in todo:
            out.publish(number, manifests[number], search.hits(manifests[number], progress))
    # From the next shard on: in a job array, that is the one most likely missing.
    behind = [*range(wanted[-1] + 1, plan.num_shards), *range(wanted[-1])]
    missing = next((number for number in behind if size_of_file(out.path(number)) is None), None)
    if missing is not None:
        print_lines(
            f"{out.folder}: the lists follow when all shards are done; shard {missing:05d} is not yet"
        )
        return 0
    return out.merge()


def _rule_of(args: argparse.Namespace) -> Rule:
    given = {
        name: vars(args)[name] for name in ("ngram", "unit", "min_share") if vars(args)[name] is not None
    }
    rule = dataclasses.replace(RULES[args.rule], **given)
    if not 2 <= rule.ngram <= MOST_NGRAM:
        raise UsageError.of_value("--ngram", rule.ngram, f"2 to {MOST_NGRAM}")
    if not 0 <= rule.min_share <= 1:
        raise UsageError.of_value("--min_share", rule.min_share, "0 to 1")
    return rule


class Search:
    """Finds the hits of shards, one after another. Raises BadInput where no evaluation text is long enough."""

    def __init__(self, folder: Path, plan: Plan, rule: Rule, evals: Evals) -> None:
        self._folder, self._plan, self._rule, self._evals = folder, plan, rule, evals
        self._token_texts = TokenTexts(folder, plan)
        if rule.unit == "words":
            units = words_as_units(evals.texts)
        else:
            engine = load_engine(plan, folder, "auto", say).bare()
            tokens = engine.encode_texts(evals.texts)
            units = tokens_as_units(tokens.ids, tokens.offsets)
        num_short = int((units.lengths() < rule.ngram).sum())
        if num_short == len(evals.texts):
            raise BadInput(
                f"none of {counted(num_short, 'evaluation document')} has {rule.ngram} {rule.unit}; give a "
                "lesser --ngram",
                found=f"at most {units.lengths().max()} {rule.unit}",
                expected=f"{rule.ngram} {rule.unit}",
                remedy="--ngram",
            )
        if num_short:
            say(
                f"note: {num_short} of {counted(len(evals.texts), 'evaluation document')} have fewer than "
                f"{rule.ngram} {rule.unit} and cannot be found"
            )
        self._index = EvalIndex(units, rule.ngram)
        say(f"{counted(len(evals.texts), 'evaluation document')}, {len(self._index):,} {rule.ngram}-grams")

    def hits(self, manifest: Manifest, progress: Progress) -> list[dict[str, Any]]:
        """Return the hits of a shard, in the order of its documents, as overlap.jsonl has them."""
        rule, found = self._rule, []
        with ShardSamples(self._folder, self._plan.spec, manifest.shard_id) as samples:
            documents = ShardDocuments(self._folder, self._plan, manifest, samples)
            for block in documents.blocks():
                units = self._units_of(block)
                eval_lengths = self._index.units.lengths()
                for hit in find_hits(units, self._index, num_gaps=rule.num_gaps, min_share=rule.min_share):
                    number = int(block.numbers[hit.document])
                    if number < 0:
                        continue
                    record, address = documents.address(number)
                    spelled = units.spell(hit.begin, hit.begin + hit.num_units)
                    if rule.unit == "words":
                        text = " ".join(spelled)
                    else:
                        text = self._token_texts.text(np.array(spelled, np.uint32))
                    place = self._evals.places[hit.eval_document]
                    entry = {
                        "shard": manifest.shard_id,
                        "record": record,
                        "document": address,
                        "place": _place_json(documents.place(number)),
                        "id": None,
                        "sha256": self._token_texts.digest(block.ids_of(hit.document)) or None,
                        "eval": {"name": self._evals.names[hit.eval_document], "place": _place_json(place)},
                        "longest": hit.num_units,
                        "unit": rule.unit,
                        "share": round(hit.num_covered / int(eval_lengths[hit.eval_document]), 4),
                        "text": text[:_MOST_TEXT_CHARS],
                    }
                    found.append((number, entry))
                progress.add(len(block.ids))
            ids, digests = documents.ids_and_digests() if found else ({}, None)
        for number, entry in found:
            if digests is not None:
                entry["sha256"] = digests[number].tobytes().hex()
            if place := entry["place"]:
                entry["id"] = ids.get((place["file"], place["byte"]))
        return [entry for _, entry in sorted(found, key=lambda item: item[0])]

    def _units_of(self, block: Block) -> Units:
        if self._rule.unit == "tokens":
            return tokens_as_units(block.ids, block.offsets)
        return words_as_units(self._token_texts.texts(block.ids, block.offsets))


def _place_json(place: tuple[str, int] | None) -> dict[str, Any] | None:
    return None if place is None else {"file": place[0], "byte": place[1]}


class Output:
    """The folder of the lists."""

    def __init__(self, folder: Path, data_dir: Path, plan: Plan, rule: Rule, evals: Evals) -> None:
        self.folder, self._data_dir, self._plan, self._evals = folder, data_dir, plan, evals
        self._settings = {"plan_id": plan.plan_id, "evals_sha256": evals.sha256(), **rule.to_json()}

    def path(self, shard_id: int) -> Path:
        """Return the path of a shard's file."""
        return self.folder / f"{shard_name(shard_id)}.jsonl"

    def is_done(self, shard_id: int, manifest: Manifest) -> bool:
        """Whether a shard's file is there, and made of this tar. Raises Refused for one of other settings."""
        if size_of_file(self.path(shard_id)) is None:
            return False
        return (
            self._head(next(read_lines(self.path(shard_id)), b""), shard_id)["tar_sha256"]
            == manifest.tar.sha256
        )

    def publish(self, shard_id: int, manifest: Manifest, hits: list[dict[str, Any]]) -> None:
        """Write the file of a shard. Raises CannotWrite, ReadWriteError."""
        head = {
            "format": _FORMAT,
            **self._settings,
            "shard": shard_id,
            "tar_sha256": manifest.tar.sha256,
            "num_documents": manifest.counts.num_documents,
            "num_tokens": manifest.counts.num_tokens,
            "num_hits": len(hits),
        }
        publish_bytes(self.path(shard_id), b"".join(map(_line_of, [head, *hits])))

    def _head(self, line: bytes, shard_id: int) -> dict[str, Any]:
        path, head = self.path(shard_id), None
        try:
            head = load_json(line)
        except ValueError:
            pass
        if not isinstance(head, dict) or head.get("format") != _FORMAT or head.get("shard") != shard_id:
            remedy = f"rm {quoted(path)}"
            raise BrokenShard(path=path, found="no list of overlaps", expected=_FORMAT, remedy=remedy)
        others = [name for name, value in self._settings.items() if head.get(name) != value]
        if others:
            raise Refused(
                f"{path} was made with another {', '.join(others)}; give --output a new folder",
                path=path,
                found=", ".join(f"{name} {head.get(name)}" for name in others),
                expected="a new folder",
                remedy="--output",
            )
        return head

    def merge(self) -> int:
        """Write the lists of all shards; equal files give equal lists. Raises BrokenShard, Refused."""
        merged, names_path = self.folder / "overlap.jsonl", self.folder / "names.txt"
        summary, names = Summary(len(self._evals.texts)), dict[str, None]()
        with PublishedFile(merged) as file:
            for shard_id in range(self._plan.num_shards):
                for entry in self._entries(shard_id, summary):
                    file.write(_line_of(entry))
                    summary.add(entry)
                    if entry["sha256"]:
                        names[f"sha256:{entry['sha256']}"] = None
                    elif place := entry["place"]:
                        names[f"at:{place['file']}:{place['byte']}"] = None
                    else:
                        summary.num_unnamed += 1
            file.sync()
            file.publish()
        publish_bytes(names_path, "".join(f"{name}\n" for name in names).encode())
        publish_bytes(self.folder / "overlap.html", summary.page(self._settings).encode())
        sync_folder(self.folder)
        print_lines(*summary.lines(), f"lists: {merged}, {self.folder / 'overlap.html'}")
        if summary.num_unnamed:
            say(
                f"warning: {summary.num_unnamed:,} hits are of documents that no list can name: plan with "
                "--digests"
            )
        if names:
            print_lines(
                f"next: shardprep plan --exclude {quoted(names_path)} ...  # or: shardprep blank "
                f"{quoted(self._data_dir)} --ids {quoted(names_path)} --output NEW"
            )
        return 0

    def _entries(self, shard_id: int, summary: Summary) -> Iterator[dict[str, Any]]:
        path, num_hits = self.path(shard_id), 0
        lines = read_lines(path)
        head = self._head(next(lines, b""), shard_id)
        summary.num_documents += head["num_documents"]
        summary.num_tokens += head["num_tokens"]
        for line in lines:
            num_hits += 1
            yield json.loads(line)
        if num_hits != head["num_hits"]:
            remedy = f"rm {quoted(path)}"
            raise BrokenShard(path=path, found=f"{num_hits} hits", expected=head["num_hits"], remedy=remedy)


def _line_of(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
