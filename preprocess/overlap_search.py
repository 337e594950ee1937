"""Find the text that a document shares with an evaluation.

Units are compared, which are numbers: token ids, or numbers of the evaluation's words, where any other word
is 0. Hashes of n-grams only show where to look. There all units are compared, so a hit is never a hash
collision. A table of booleans rejects nearly all n-grams, at 20 ns per unit.

Words are separated by white space. They are in lower case and normal form NFKC, without punctuation, symbols
and control characters, and empty ones do not count: "Don't  STOP !" has the words dont and stop.
"""

from __future__ import annotations

import functools
import itertools
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.make.chosen_engine import load_engine
from preprocess.make.reference import decode, load_tokenizer
from preprocess.make.token_ids import TokenBatch
from preprocess.read.documents import DocumentBatch
from preprocess.read.formats import Numbers, Texts
from shardprep.console import counted, say
from shardprep.errors import BadInput
from shardprep.format import names
from shardprep.format.data_folder import DataFolder
from shardprep.format.plan import Plan
from shardprep.format.planned_tokenizer import check_tokenizer_files

_SEPARATOR = "\x1f"  # between texts; Python counts it as white space
_BASE = np.uint64(0x9FB21C651E98DF25)
# How many places of an n-gram are compared, in the evaluation and in a document. Text of more evaluation
# documents is found in the first ones, and text that repeats one word takes no time.
_MAX_PLACES = 16
_MAX_TEXT_CHARS = 2000  # of a hit


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


class Search:
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

    def hits_of(self, documents: DocumentBatch) -> Iterator[dict[str, object]]:
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
    joined = _SEPARATOR.join(_normal(text).replace(_SEPARATOR, " ") for text in texts)
    # chars, kept: uint32[characters], their code points
    chars = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
    kept = chars[_is_kept()[chars]]
    kept_texts = kept.tobytes().decode("utf-32-le").split(_SEPARATOR)
    return [text.split() for text in kept_texts]


def _normal(text: str) -> str:
    # For ASCII, lower() equals NFKC and casefold(), and takes a tenth of the time.
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", text).casefold()


@functools.lru_cache(maxsize=1)
def _is_kept() -> npt.NDArray[np.bool_]:
    """Return which code points are letters, marks, numbers or white space. Takes 0.2 s."""
    chars = map(chr, range(sys.maxunicode + 1))
    return np.array([char.isspace() or unicodedata.category(char)[0] in "LMN" for char in chars])
