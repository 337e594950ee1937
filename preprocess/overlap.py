"""The command ``overlap``: list the documents of a data set that contain text of an evaluation.

It reads the input, since that has the texts as they were encoded, and the offsets of documents.

Units are compared, which are numbers: token ids, or numbers of the evaluation's words, where any
other word is 0. Hashes of n-grams only show where to look. There all units are compared, so a hit is never a
hash collision. A table of booleans rejects nearly all n-grams, at 20 ns per unit. The hits of each shard are
written to one file, atomically. Its name has a hash of all that they depend on, so a second call continues
with the missing shards. The call that finds the files of all shards merges them into the lists.

Words are separated by white space. They are in lower case and normal form NFKC, without punctuation, symbols
and control characters, and empty ones do not count: "Don't  STOP !" has the words dont and stop.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import heapq
import itertools
import json
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.given_inputs import GivenInputs, add_given_inputs, blank_command, unblanked_documents
from preprocess.make.chosen_engine import load_engine
from preprocess.make.reference import decode, load_tokenizer
from preprocess.make.token_ids import TokenBatch
from preprocess.plan.dividing import stamp_inputs
from preprocess.plan.inputs import find_inputs
from preprocess.read.documents import DocumentBatch, DocumentReader
from preprocess.read.formats import Numbers, Texts
from shardprep import files, publishing
from shardprep.console import Progress, counted, print_lines, quoted, say, shards_text
from shardprep.errors import BadInput, BrokenShard, NotFound, UsageError
from shardprep.format import names
from shardprep.format.data_folder import OVERLAP_FOLDER, DataFolder
from shardprep.format.plan import Cut, Plan, need_plan, ranges_between
from shardprep.format.plan_options import PlanOptions
from shardprep.format.planned_tokenizer import check_tokenizer_files
from shardprep.option_flags import add_flags_of
from shardprep.output_folder import OutputFolder

_MARK = "overlap.json"  # shows that a folder is this command's
_HITS = "overlap.jsonl"
_NAMES = "names.txt"
_PAGE = "overlap.html"
_WRITTEN = re.compile(r"shard-[0-9]{5}\.[0-9a-f]{12}\.jsonl|overlap\.jsonl?|names\.txt|overlap\.html")
_HIT_SHA256 = re.compile(rf"[0-9a-f]{{{2 * names.DIGEST_BYTES}}}")
_MAX_HIT_BYTES = 1 << 20  # a hit has up to 2,000 characters of text, and names
_SEPARATOR = "\x1f"  # between texts; Python counts it as white space
_BASE = np.uint64(0x9FB21C651E98DF25)
# How many places of an n-gram are compared, in the evaluation and in a document. Text of more evaluation
# documents is found in the first ones, and text that repeats one word takes no time.
_MAX_PLACES = 16
_MAX_TEXT_CHARS = 2000  # of a hit
_MAX_SHOWN = 50  # hits on the page
# Options of plan that say how to read the files of an evaluation.
_READ_OPTIONS = ("recursive", "doc", "encoding", "text_field", "text_template")


class Rule(NamedTuple):
    """A document overlaps if it shares ``ngram`` units in a row with an evaluation document."""

    unit: str  # words or tokens
    ngram: int
    num_gaps: int = 0  # units after the first n-gram of a shared run that may differ
    min_share: float = 0.0  # of the evaluation document's units, which the document must have


RULES = {
    # Brown et al. 2020, arXiv 2005.14165, appendix C.
    "gpt3": Rule("words", 13),
    # Chowdhery et al. 2022, arXiv 2204.02311, section 8.
    "palm": Rule("tokens", 8, min_share=0.7),
    # Touvron et al. 2023, arXiv 2307.09288, appendix A.6.
    "llama": Rule("tokens", 10, num_gaps=4),
}


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
        existing = {*out.names()}
        return [number for number, name in enumerate(names_of_hits) if name not in existing]

    todo = [number for number in missing() if number in chosen]
    if len(todo) < len(chosen):
        say(f"{len(chosen) - len(todo)} of {counted(len(chosen), 'shard')} are done already")
    if todo:
        search = _Search(folder, plan, rule, evals)
        progress = Progress("looking", sum(plan.shard(number).num_bytes for number in todo))
        for number in todo:
            lines = []
            for documents in unblanked_documents(plan, folder, number, reader):
                lines += [json.dumps(hit, ensure_ascii=False) + "\n" for hit in search.hits_of(documents)]
                progress.add(documents.num_bytes)
            out.publish(names_of_hits[number], "".join(lines).encode("utf-8", "surrogatepass"))
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


class _Search:
    """Finds hits. Takes 250 bytes per unit of the evaluation. Raises BadInput if that has no n-gram."""

    def __init__(self, folder: DataFolder, plan: Plan, rule: Rule, evals: list[tuple[str, bytes]]) -> None:
        self._rule = rule
        self._eval_names = [name for name, _ in evals]
        self._number_of = defaultdict[str, int](itertools.count(1).__next__)  # of a word
        if rule.unit == "tokens":
            self._engine = load_engine(plan, folder, "auto", say).bare()
            content = check_tokenizer_files(folder, plan.tokenizer_files, names.TOKENIZER_FILE)
            tokenizer_path = folder.path_of(f"{names.TOKENIZER_DIR}/{names.TOKENIZER_FILE}")
            self._tokenizer = load_tokenizer(tokenizer_path, content)
        _, units = self._units_of(Texts([text for _, text in evals]), may_add=True)
        lengths = np.diff(units.offsets)
        num_short = int((lengths < rule.ngram).sum())
        num_evals = counted(len(lengths), "evaluation document")
        if num_short == len(lengths):
            found = f"at most {lengths.max()} {rule.unit} in {num_evals}"
            raise BadInput(found=found, expected=f"{rule.ngram}, or a smaller --ngram", remedy="--ngram")
        self._evals, self._eval_of = units, _document_of(units)
        hashes = self._hashes_of(units)
        # N-grams do not continue in the next document.
        is_inside = self._eval_of[: len(hashes)] == self._eval_of[rule.ngram - 1 :]
        self._places: dict[int, list[int]] = defaultdict(list)  # of n-grams, by hash
        for place in np.flatnonzero(is_inside).tolist():
            places = self._places[int(hashes[place])]
            if len(places) < _MAX_PLACES:
                places.append(place)
        num_bits = max(16, (len(self._places) * 32).bit_length())  # one n-gram in 32 passes by chance
        self._shift = np.uint64(64 - num_bits)
        self._table = np.zeros(1 << num_bits, np.bool_)
        self._table[hashes[is_inside] >> self._shift] = True
        short = f"{num_short:,} with fewer than {rule.ngram} {rule.unit} cannot be found"
        say(f"{num_evals}, {len(self._places):,} different n-grams; {short}")

    def _units_of(self, texts: Texts, *, may_add: bool = False) -> tuple[list[Any], TokenBatch]:
        """Return the units of texts, as they are and as numbers. ``may_add`` gives numbers to new words."""
        if self._rule.unit == "tokens":
            tokens = self._engine.encode(texts)
            return tokens.documents(), tokens
        words = _words_of(text.decode() for text in texts)
        every = itertools.chain.from_iterable(words)
        offsets = np.cumsum([0, *map(len, words)])
        numbers = map(self._number_of.get, every, itertools.repeat(0))
        if may_add:
            numbers = map(self._number_of.__getitem__, every)
        return words, TokenBatch(ids=np.fromiter(numbers, np.uint32, int(offsets[-1])), offsets=offsets)

    def _hashes_of(self, units: TokenBatch) -> npt.NDArray[np.uint64]:
        """Return the hash of the n-gram at each place."""
        count = max(0, len(units.ids) - self._rule.ngram + 1)
        numbers = units.ids.astype(np.uint64)
        hashes = np.zeros(count, np.uint64)
        for begin in range(self._rule.ngram):
            hashes += numbers[begin : begin + count]
            hashes *= _BASE
        return hashes

    def _shared(self, units: TokenBatch) -> dict[tuple[int, int], set[int]]:
        """Return the shifts (place there minus here) of shared n-grams by (document, evaluation document)."""
        hashes = self._hashes_of(units)
        places = np.flatnonzero(self._table[hashes >> self._shift])
        columns = places, _document_of(units)[places], hashes[places]
        offsets: dict[tuple[int, int], set[int]] = defaultdict(set)
        times = Counter[tuple[int, int]]()
        for place, document, hashed in zip(*(column.tolist() for column in columns), strict=True):
            times[document, hashed] += 1
            if times[document, hashed] <= _MAX_PLACES:
                for eval_place in self._places.get(hashed, ()):
                    offsets[document, int(self._eval_of[eval_place])].add(eval_place - place)
        return offsets

    def hits_of(self, documents: DocumentBatch) -> Iterator[dict[str, Any]]:
        """Yield the hits of a batch, as in overlap.jsonl: pairs of documents that share an n-gram.

        A shared run may have ``num_gaps`` units that differ after its first n-gram, and ends with an equal
        unit. Pairs with less than ``min_share`` of the evaluation document are left out.
        """
        rule = self._rule
        evals = self._evals
        units_of, units = self._units_of(documents.texts)
        for (number, eval_number), shifts in sorted(self._shared(units).items()):
            first, end = units.offsets[number : number + 2].tolist()
            eval_first, eval_end = evals.offsets[eval_number : eval_number + 2].tolist()
            is_shared = np.zeros(eval_end - eval_first, np.bool_)  # of the evaluation document's units
            longest = (0, 0)  # length of the longest run, and minus its begin: of equal runs the first wins
            for shift in shifts:
                # Find all runs at this shift, also those with n-grams beyond _MAX_PLACES.
                low = max(first, eval_first - shift)
                high = min(end, eval_end - shift)
                is_equal = units.ids[low:high] == evals.ids[low + shift : high + shift]
                edges = np.flatnonzero(np.diff(is_equal, prepend=False, append=False)).reshape(-1, 2)
                for begin, stop in edges[edges[:, 1] - edges[:, 0] >= rule.ngram].tolist():
                    # Extend the run over the gaps, up to the last equal unit.
                    differing = np.flatnonzero(~is_equal[stop:])
                    has_end = len(differing) > rule.num_gaps
                    stop = stop + int(differing[rule.num_gaps]) if has_end else len(is_equal)
                    run = is_equal[begin:stop]
                    run = run[: np.flatnonzero(run)[-1] + 1]
                    is_shared[low + begin + shift - eval_first :][: len(run)] |= run
                    longest = max(longest, (len(run), first - low - begin))
            num_units = longest[0]
            begin = -longest[1]
            if not num_units or is_shared.mean() < rule.min_share:
                continue
            shared = units_of[number][begin : begin + num_units]
            is_words = rule.unit == "words"
            text = " ".join(shared) if is_words else self._tokenizer.call(decode, shared)
            document = documents.only(np.array([number]))
            yield {
                "document": f"{document.input_path}:{document.offsets[0]}",
                "id": document.columns["id"][0] if "id" in document.columns else None,
                "sha256": document.digests()[0].tobytes().hex(),
                "eval": self._eval_names[eval_number],
                "share": round(float(is_shared.mean()), 4),
                "longest": num_units,
                "text": text[:_MAX_TEXT_CHARS],
            }


def _document_of(units: TokenBatch) -> Numbers:
    """Return the document of each unit."""
    return np.repeat(np.arange(len(units.offsets) - 1), np.diff(units.offsets))


def _words_of(texts: Iterable[str]) -> list[list[str]]:
    """Return the words of each text. Takes 25 ns per character of English, 70 ns of Korean."""
    # For ASCII, lower() equals NFKC and casefold(), and takes a tenth of the time.
    normal = (
        text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold() for text in texts
    )
    joined = _SEPARATOR.join(text.replace(_SEPARATOR, " ") for text in normal)
    chars = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
    kept = chars[_is_kept()[chars]].tobytes().decode("utf-32-le")
    return [text.split() for text in kept.split(_SEPARATOR)]


@functools.lru_cache(maxsize=1)
def _is_kept() -> npt.NDArray[np.bool_]:
    """Return which code points are letters, marks, numbers or white space. Takes 0.2 s."""
    chars = map(chr, range(sys.maxunicode + 1))
    return np.array([char.isspace() or unicodedata.category(char)[0] in "LMN" for char in chars])


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


def _merge(out: OutputFolder, names_of_hits: list[str], blank: str, settings: dict[str, Any]) -> None:
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
        file.publish()
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
