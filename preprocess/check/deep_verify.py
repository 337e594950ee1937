"""``verify --deep``: compares some shards with what a second, separate reader finds in their input.

``plain_reader`` shares no code with the worker's readers. The reference engine encodes each text that it
finds, and the standard library's tarfile reads the tar. Compared are of each document place, text, digest,
side of a validation split, token ids and loss mask; of documents left out place and reason; kept ids; and the
counts of the manifest. So a document that was lost, altered, doubled or moved is found, and so are ids that
another engine got wrong.

What both sides share is not proven: the libraries that change text (--fix_text, --normalize) and, of
conversations, what calls transformers to render the chat template. Ids and loss mask are those that
transformers gives; without {% generation %}, which part of the text is the assistant's is shared, too. Of
rows packed best_fit neither the order of documents nor the place of a row is compared.

Price: see docs/seeing.md. Memory does not grow with the shard, but with what differs, with kept ids, and with
what the plain reader holds.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import random
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.check.plain_reader import PlainRecord, check_readable, plain_records
from preprocess.check.verify import Problem
from preprocess.formats.chat import ChatTemplate, Rendered, encode_conversations, render_conversations
from preprocess.formats.long_documents import UncuttableText
from preprocess.make.engines import NO_LOSS, Engine, Ids
from preprocess.make.worker import load_worker
from preprocess.options import WorkerSettings
from preprocess.plan.plan_file import Plan
from shardprep.errors import BrokenShard, ShardprepError
from shardprep.files import errors_named
from shardprep.format.idx import read_idx
from shardprep.format.input_formats import input_kind, place_text
from shardprep.format.manifest import Manifest, ValidationCounts, read_manifest
from shardprep.format.names import (
    DOC_STARTS_FIELD,
    LOSS_MASK_FIELD,
    ROW_TOKENS_FIELD,
    TEXT_FIELD,
    TOKENIZER_DIR,
    digests_path,
    ids_path,
    quarantine_path,
    remake_command,
    tar_path,
    token_field,
)
from shardprep.format.withdrawals import read_left_out

_BATCH_CHARS = 1 << 18  # encoded at once
_LONG_CHARS = 1 << 20  # a longer text is encoded in pieces
_PIECE_CHARS = 1 << 18
_NUM_RENDERED = 256  # conversations at once
_NUM_NAMED = 3  # documents of a kind of difference that are named
_NPY_HEADER_BYTES = 128
_SHOWN_CHARS = 40
_DIGEST_BYTES = 16
_COUNTS = ("num_lines", "num_empty_lines", "num_filtered", "num_documents", "num_tokens")  # of ShardCounts

_Place = tuple[int, int]  # input, and where in it


def choose_shards(plan: Plan, num_shards: int) -> list[int]:
    """Some shards that have input, ascending; the same ones for a plan each time."""
    sizes = plan.shard_bytes()
    full = [shard_id for shard_id in range(plan.num_shards) if sizes[shard_id]]
    chooser = random.Random(plan.plan_id)  # noqa: S311 - a sample
    return sorted(chooser.sample(full, min(num_shards, len(full))))


def verify_deep(
    folder: Path,
    plan: Plan,
    shard_ids: Sequence[int],
    *,
    input_dir: Path | None,
    progress: Callable[[int], None],
) -> tuple[list[Problem], Counter[str]]:
    """Return the shards that differ from their input, and the documents, tokens and left out of the others.

    ``progress`` is told 1 for each shard. Raises what loading the tokenizer raises, and Refused where a
    library that changes or renders text has another version than planned.
    """
    check_readable(item.path for item in plan.inputs)
    settings = WorkerSettings(engine="tokenizers", input_dir=input_dir)
    worker = load_worker(plan, folder, settings, num_cpus=1, warn=lambda _: None)
    problems, checked = [], Counter[str]()
    for shard_id in shard_ids:
        try:
            checked.update(_check_shard(folder, worker.plan, shard_id, worker.engine))
        except ShardprepError as error:
            problems.append(Problem(shard_id=shard_id, error=error))
        progress(1)
    return problems, checked


def _check_shard(folder: Path, plan: Plan, shard_id: int, engine: Engine) -> dict[str, int]:
    """Compare a shard with its input. Raises BrokenShard, naming what differs, and what reading raises."""
    manifest = read_manifest(folder, shard_id)
    withdrawn = read_left_out(folder, plan.options.rewritten).documents_of(shard_id)
    found = _Input(plan, shard_id, engine, folder / TOKENIZER_DIR, withdrawn=frozenset(withdrawn.tolist()))
    sides = (False, True) if plan.options.validation_fraction else (False,)
    held = [_Shard(folder, plan, manifest, is_validation=side).documents() for side in sides]
    differences = _compare(plan, found.documents(), held)
    differences += _compare_left_out(folder, manifest, found.left_out)
    differences += _compare_ids(folder, plan, shard_id, found.ids)
    differences += found.counts_that_differ(manifest)
    if differences:
        raise BrokenShard(
            f"it is not what its input gives: {'; '.join(differences)}; "
            f"run: {remake_command(shard_id, folder)}, then this again. If it still differs, this version of "
            "shardprep reads that input wrongly: do not train on it, and report the places above"
        )
    num_documents, num_tokens = found.counts["num_documents"], found.counts["num_tokens"]
    return {"documents": num_documents, "left out": found.left_out.total(), "tokens": num_tokens}


class _Key(NamedTuple):
    """What must be equal of a document; the place where each sample is one document."""

    place: _Place | None
    text: bytes  # its hash; empty where the shard holds no text
    ids: bytes  # the hash of its token ids, with their loss mask
    digest: bytes  # of its content; empty where none is kept, and of what goes on from another row


class _Document(NamedTuple):
    """A document of the input or of a shard; of rows packed best_fit, what a row holds of it."""

    key: _Key
    number: int  # in the shard
    line: int | None  # of the shard's input; None in rows
    # Where it begins; of a shard what the idx names for it, or for rows that begin in it.
    places: list[_Place]
    text: str = ""  # its beginning
    is_validation: bool = False


@dataclass
class _Input:
    """The input of a shard. Its counts are complete once ``documents`` are at their end."""

    plan: Plan
    shard_id: int
    engine: Engine
    tokenizer: Path  # folder
    withdrawn: frozenset[int]  # numbers of the documents that rewrite left out
    num_withdrawn: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # _COUNTS
    lengths: Counter[int] = field(default_factory=Counter)  # of documents, by their bits
    left_out: Counter[tuple[str, int, str]] = field(default_factory=Counter)  # input, place, reason
    ids: list[tuple[int, int, str]] = field(default_factory=list)  # input, place, id
    sources: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    texts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by source, as ``run`` of a manifest
    validation: Counter[str] = field(default_factory=Counter)  # documents and tokens for it

    def documents(self) -> Iterator[_Document]:
        """Yield the documents in order, with the keys that the shard must hold."""
        batch: list[PlainRecord] = []
        num_chars = 0
        for record in self._texts():
            batch.append(record)
            num_chars += len(record.text)
            if num_chars > _BATCH_CHARS:
                yield from self._encoded(batch)
                batch, num_chars = [], 0
        yield from self._encoded(batch)

    def counts_that_differ(self, manifest: Manifest) -> list[str]:
        """Name the counts of a manifest that are not those of the input."""
        counts = manifest.counts
        histogram = [self.lengths[bits] for bits in range(max(self.lengths, default=-1) + 1)]
        reasons = Counter(reason for _, _, reason in self.left_out.elements())
        pairs: list[tuple[str, Any, Any]] = [
            *((name, getattr(counts, name), self.counts[name]) for name in _COUNTS),
            ("quarantined", counts.quarantined, dict(reasons)),
            ("length_histogram", counts.length_histogram, histogram),
        ]
        whats = ["num_documents", "num_tokens"]
        if counts.validation is not None:
            pairs += [
                (f"{what} for validation", getattr(counts.validation, what), self.validation[what])
                for what in whats
            ]
        if not self.plan.options.source_field:  # older data sets counted bad records as their file's
            whats.append("num_quarantined")
        for name in sorted({*counts.sources, *self.sources}):
            there, here = counts.sources.get(name), self.sources[name]
            pairs += [(f"{what} of source {name}", getattr(there, what, 0), here[what]) for what in whats]
        texts = manifest.run.get("texts", self.texts)  # older data sets have none
        pairs += [
            (f"texts of source {name}", texts.get(name), self.texts.get(name))
            for name in sorted({*texts, *self.texts})
        ]
        differing = _Named("counts of its manifest are others")
        for name, said, given in pairs:
            if said != given:
                differing.add(f"{name} {said}, the input gives {given}")
        return differing.words()

    def _texts(self) -> Iterator[PlainRecord]:
        """Yield the documents, and count what is none; ``--limit`` ends behind the last one."""
        most = self.plan.shard(self.shard_id).most_documents
        if most == 0:
            return
        for record in self._rendered():
            self.counts["num_lines"] += 1
            if record.reason:
                self._leave_out(record)
            elif record.is_filtered or not record.text:
                self.counts["num_filtered" if record.is_filtered else "num_empty_lines"] += 1
            else:
                yield record
                if most is not None and (most := most - 1) == 0:
                    return

    def _rendered(self) -> Iterator[PlainRecord]:
        """The records; conversations as their texts, with the characters that the assistant wrote."""
        records, options = plain_records(self.plan, self.shard_id), self.plan.options
        if not options.is_chat:
            yield from records
            return
        template = _template_of(self.plan)
        while some := list(itertools.islice(records, _NUM_RENDERED)):
            given = [record.text for record in some if record.text]
            answers = iter(render_conversations(template, given) if given else [])
            for record in some:
                answer = next(answers) if record.text else None
                if isinstance(answer, Rendered):
                    yield replace(record, text=answer.text, messages=record.text)
                else:
                    yield record if answer is None else replace(record, text="", reason=answer.reason)

    def _leave_out(self, record: PlainRecord) -> None:
        self.left_out[self.plan.inputs[record.source].path, record.offset, record.reason] += 1
        self.sources[self.plan.source_of(record.source)].update(num_quarantined=1)

    def _encoded(self, batch: list[PlainRecord]) -> Iterator[_Document]:
        is_chat = self.plan.options.is_chat
        short = [record for record in batch if is_chat or len(record.text) <= _LONG_CHARS]
        if is_chat:
            parts = iter(self._encoded_chats([record.messages for record in short]))
        else:
            tokens = self.engine.encode_documents([record.text for record in short], end_id=self.plan.end_id)
            parts = iter(tokens.documents())
        for record in batch:
            try:
                is_short = is_chat or len(record.text) <= _LONG_CHARS
                ids = next(parts) if is_short else self._encoded_in_pieces(record.text)
            except UncuttableText:
                self._leave_out(replace(record, reason="uncuttable"))
                continue
            if self.counts["num_documents"] + self.num_withdrawn in self.withdrawn:
                self.counts["num_lines"] -= 1
                self.num_withdrawn += 1
                continue
            record = replace(record, line=record.line - self.num_withdrawn)
            self.counts.update(num_documents=1, num_tokens=len(ids))
            self.lengths[len(ids).bit_length()] += 1
            if record.id is not None and self.plan.options.id_field:
                self.ids.append((record.source, record.offset, record.id))
            source = record.named or self.plan.source_of(record.source)
            self.sources[source].update(num_documents=1, num_tokens=len(ids))
            self._count_text(source, record.text, len(ids))
            yield from self._documents_of(record, ids)

    def _encoded_chats(self, conversations: list[str]) -> list[Ids]:
        found = encode_conversations(self.tokenizer, _template_of(self.plan), conversations)
        return [
            np.array(ids, np.uint32) | np.where(mask, np.uint32(0), NO_LOSS).astype(np.uint32)
            for ids, mask in found
        ]

    def _count_text(self, source: str, text: str, num_tokens: int) -> None:
        of = self.texts.setdefault(source, {"num_bytes": 0, "num_chars": 0, "lengths": {}})
        of["num_bytes"] += len(text.encode())
        of["num_chars"] += len(text)
        digits = f"{num_tokens:b}"
        length = of["lengths"].setdefault(str(int(digits[:4].ljust(len(digits), "0"), 2)), [0, 0])
        length[0] += 1
        length[1] += num_tokens

    def _encoded_in_pieces(self, text: str) -> Ids:
        """The ids of a long text. Raises UncuttableText where it is too long to be encoded at all."""
        pieces = (text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS))
        return self.engine.encode_long(pieces, can_be_cut=self.plan.can_be_cut, end_id=self.plan.end_id)

    def _documents_of(self, record: PlainRecord, ids: Ids) -> Iterator[_Document]:
        """The document as a shard holds it: best_fit cuts it into rows, and no row holds one without ids."""
        options, place = self.plan.options, (record.source, record.offset)
        digest = _digest_of(record) if options.digests else b""
        # Compared as fractions of 1, without the worker's arithmetic.
        is_validation = bool(digest) and Fraction(int(digest[:8].hex(), 16), 2**64) < Fraction(
            options.validation_fraction
        )
        if not self.plan.spec.has_rows:
            text = _hash(record.text.encode()) if options.keep_text else b""
            keys = [_Key(place, text, _hash_of_ids(ids), digest)]
        elif options.pack == "best_fit":
            pieces = [ids[at : at + options.seq_len] for at in range(0, len(ids), options.seq_len)]
            keys = [
                _Key(None, b"", _hash_of_ids(piece, number == 0), b"" if number else digest)
                for number, piece in enumerate(pieces)
            ]
        else:
            keys = [_Key(None, b"", _hash_of_ids(ids), digest)] if len(ids) else []
        if keys and is_validation:
            self.validation.update(num_documents=1, num_tokens=len(ids))
        for key in keys:
            yield _Document(key, 0, record.line, [place], record.text[:_SHOWN_CHARS], is_validation)


def _template_of(plan: Plan) -> ChatTemplate:
    options = plan.options
    return ChatTemplate(options.chat_template, options.chat_tokens, options.allow_special_tokens)


def _digest_of(record: PlainRecord) -> bytes:
    """The first half of the sha256 of the text, or of the messages without nulls, their keys sorted."""
    text = record.text
    if record.messages:
        messages = [
            {key: message[key] for key in message if message[key] is not None}
            for message in json.loads(record.messages)
        ]
        text = json.dumps(messages, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.new("sha256", text.encode()).digest()[:_DIGEST_BYTES]


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _hash_of_ids(ids: npt.NDArray[Any], is_begin: bool = True) -> bytes:
    return _hash(ids.astype("<u4").tobytes() + bytes([is_begin]))


class _Shard:
    """The samples for training or for validation of a shard's tar, one by one, beside its idx and digests."""

    def __init__(self, folder: Path, plan: Plan, manifest: Manifest, *, is_validation: bool) -> None:
        shard_id = manifest.shard_id
        none = ValidationCounts(num_samples=0, num_documents=0, num_tokens=0)
        validation = manifest.counts.validation or none
        self._spec, self._path = plan.spec, tar_path(folder, shard_id)
        self._is_cut = plan.options.pack == "best_fit"
        self._ids_name = token_field(plan.spec.record, plan.spec.token_format)
        records = read_idx(folder, plan.spec, shard_id).tolist()
        cut = len(records) - validation.num_samples
        self._behind = {record[0] for record in records[cut:]}  # where ids of samples for validation begin
        self._is_validation = is_validation
        self._records = iter(records[cut:] if is_validation else records[:cut])
        self._remedy = f"run: {remake_command(shard_id, folder)}"
        data = digests_path(folder, shard_id).read_bytes() if manifest.digests is not None else b""
        found = [data[at : at + _DIGEST_BYTES] for at in range(0, len(data), _DIGEST_BYTES)]
        cut = len(found) - validation.num_documents
        self._digests = iter(found[cut:] if is_validation else found[:cut])

    def documents(self) -> Iterator[_Document]:
        """Yield the documents in order. Raises BrokenShard where the idx says otherwise than the tar."""
        if self._spec.has_rows:
            yield from _documents_in(self._rows(), self._digests, is_cut=self._is_cut)
        else:
            yield from self._samples()
        if next(self._records, None) is not None:
            raise BrokenShard(f"the idx of {self._path} has more samples than it; {self._remedy}")

    def _samples(self) -> Iterator[_Document]:
        is_json = self._spec.kind == "json"
        header = 0 if is_json else _NPY_HEADER_BYTES
        for number, (key, members) in enumerate(_groups(self._path)):
            offset, data = members[self._ids_name]
            if self._is_of_other_side(offset + header):
                continue
            ids = np.array(json.loads(data), np.uint32) if is_json else _array(data)
            place = self._place(offset + header, len(data) - header, len(ids))
            text = _hash(members[TEXT_FIELD][1]) if TEXT_FIELD in members else b""
            key_of_ids = _Key(place, text, _hash_of_ids(ids), next(self._digests, b""))
            yield _Document(key_of_ids, number, int(key.rpartition("_")[2]), [place])

    def _is_of_other_side(self, offset: int) -> bool:
        return (offset in self._behind) != self._is_validation

    def _rows(self) -> Iterator[tuple[Ids, list[int], _Place]]:
        """Of each row its ids, with their mask; where documents begin; the place of its first token's."""
        seq_len = self._spec.seq_len
        for _, members in _groups(self._path):
            offset, data = members[self._ids_name]
            if self._is_of_other_side(offset + _NPY_HEADER_BYTES):
                continue
            rows, starts = _array(data), _array(members[DOC_STARTS_FIELD][1]).astype(np.int64)
            lengths = [seq_len] * len(rows)
            if ROW_TOKENS_FIELD in members:
                lengths = _array(members[ROW_TOKENS_FIELD][1]).tolist()
            has_loss = np.ones(rows.shape, np.uint8)
            if LOSS_MASK_FIELD in members:
                has_loss = _array(members[LOSS_MASK_FIELD][1])
            masked = rows.astype(np.uint32) | np.where(has_loss == 0, NO_LOSS, np.uint32(0))
            row_bytes = rows.itemsize * seq_len
            for number, length in enumerate(lengths):
                place = self._place(offset + _NPY_HEADER_BYTES + number * row_bytes, row_bytes, length)
                own = starts[starts // seq_len == number] % seq_len
                yield masked[number, :length], own.tolist(), place

    def _place(self, *found: int) -> _Place:
        """The place that the next record of the idx names, once its offset, bytes and tokens are right."""
        record = next(self._records, (0, 0, 0, 0, 0))
        if record[:3] != found:
            raise BrokenShard(
                f"{self._path} has a sample of (offset, bytes, tokens) {found}, its idx says {record[:3]}; "
                f"{self._remedy}"
            )
        return record[3], record[4]


def _documents_in(
    rows: Iterable[tuple[Ids, list[int], _Place]], digests: Iterator[bytes], *, is_cut: bool
) -> Iterator[_Document]:
    """The documents in rows; ``is_cut``: what goes on in another row counts for itself."""
    held: list[Ids] = []
    places: list[_Place] = []
    is_begin, number = True, 0

    def whole() -> _Document:
        digest = next(digests, b"") if is_begin else b""
        key = _Key(None, b"", _hash_of_ids(np.concatenate(held), is_begin), digest)
        return _Document(key, number, None, places)

    for ids, starts, place in rows:
        for begin, end in itertools.pairwise(sorted({0, *starts, len(ids)})):
            if held and (begin in starts or is_cut):
                yield whole()
                held, places, number = [], [], number + 1
            if not held:
                is_begin = begin in starts
            held.append(ids[begin:end])
            places = [*places, place] if begin == 0 else places
    if held:
        yield whole()


def _groups(path: Path) -> Iterator[tuple[str, dict[str, tuple[int, bytes]]]]:
    """The samples of a tar: (key, member -> (where its data begins, the data)), by the standard library."""
    key = ""
    members: dict[str, tuple[int, bytes]] = {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
                name, _, suffix = member.name.partition(".")
                if members and (name != key or suffix in members):
                    yield key, members
                    members = {}
                file = tar.extractfile(member)
                key, members[suffix] = name, (member.offset_data, b"" if file is None else file.read())
    except (tarfile.TarError, EOFError) as error:
        raise BrokenShard(f"{path} is no whole tar: {error}") from None
    if members:
        yield key, members


def _array(data: bytes) -> npt.NDArray[Any]:
    return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))


class _Named:
    """Differences of one kind: how many, and the first of them in words."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._num = 0
        self._first: list[str] = []

    def add(self, words: str, number: int = 1) -> None:
        self._num += number
        if len(self._first) < _NUM_NAMED:
            self._first.append(words)

    def words(self) -> list[str]:
        more = "; ..." if self._num > len(self._first) else ""
        return [f"{self._num} {self._kind} ({'; '.join(self._first)}{more})"] if self._num else []


def _beside(
    expected: Iterator[_Document], sides: Sequence[Iterator[_Document]]
) -> Iterator[tuple[_Document | None, _Document | None]]:
    """Each document of the input with the next one of its side of the shard; then what is left of both."""
    for document in expected:
        yield document, next(sides[document.is_validation], None)
    yield from ((None, sample) for sample in itertools.chain(*sides))


def _compare(plan: Plan, expected: Iterator[_Document], held: Sequence[Iterator[_Document]]) -> list[str]:
    """Say which documents are missing, altered, not of the input, in another order or at another place.

    ``held``: those of the shard for training, and those for validation.
    """
    missing: dict[_Key, list[_Document]] = {}
    extra: dict[_Key, list[_Document]] = {}
    moved = _Named("documents in another order, or with another line or place")
    for document, sample in _beside(expected, held):
        is_in_place = False
        pairs: list[tuple[_Document, _Document]] = []
        if document is not None and sample is not None and document.key == sample.key:
            is_in_place, pairs = not (missing or extra), [(document, sample)]
        else:
            if document is not None and (same := _kept(document, extra, missing)) is not None:
                pairs.append((document, same))
            if sample is not None and (equal := _kept(sample, missing, extra)) is not None:
                pairs.append((equal, sample))
        if plan.options.pack == "best_fit":
            continue
        for one, other in pairs:
            is_elsewhere = not {*other.places} <= {*one.places}
            if not is_in_place or is_elsewhere or other.line not in (None, one.line):
                moved.add(f"document {other.number} of {_at(plan, one.places[0])}")
    altered = _Named("documents whose text, digest, side, or ids by the reference engine, are others")
    lost = _Named("documents of the input are missing")
    found = _Named("documents are not in the input")
    samples = {sample.key.place or sample.number: sample for each in extra.values() for sample in each}
    for document in itertools.chain.from_iterable(missing.values()):
        words = f"{_at(plan, document.places[0])} {document.text!r}"
        is_altered = samples.pop(document.key.place, None) is not None if document.key.place else False
        (altered if is_altered else lost).add(words)
    for sample in samples.values():
        at = f" at {_at(plan, sample.places[0])}" if sample.places else ""
        found.add(f"document {sample.number}{at}")
    return altered.words() + lost.words() + found.words() or moved.words()


def _kept(
    one: _Document, others: dict[_Key, list[_Document]], ones: dict[_Key, list[_Document]]
) -> _Document | None:
    """Take what equals ``one`` out of ``others``; where there is none, keep ``one`` among ``ones``."""
    if (equal := others.get(one.key)) is None:
        ones.setdefault(one.key, []).append(one)
        return None
    found = equal.pop(0)
    if not equal:
        del others[one.key]
    return found


def _at(plan: Plan, place: _Place) -> str:
    return place_text(plan.inputs[place[0]].path, place[1])


def _compare_left_out(folder: Path, manifest: Manifest, expected: Counter[tuple[str, int, str]]) -> list[str]:
    """Compare the documents left out, by place and reason, with the quarantine file."""
    there: Counter[tuple[str, int, str]] = Counter()
    if manifest.quarantine is not None:
        for line in _lines_of(quarantine_path(folder, manifest.shard_id)):
            there[line["source"], line["source_offset"], line["reason"]] += 1
    missing = _Named("documents of the input are bad, and not in quarantine with that reason")
    extra = _Named("documents are in quarantine, and are not bad for that reason")
    for named, counts in ((missing, expected - there), (extra, there - expected)):
        for (path, offset, reason), number in sorted(counts.items()):
            named.add(f"{place_text(path, offset)}: {reason}", number)
    return missing.words() + extra.words()


def _compare_ids(folder: Path, plan: Plan, shard_id: int, expected: list[tuple[int, int, str]]) -> list[str]:
    """Compare the kept ids, in their order, with those of the input; lines of .txt have none."""
    if not plan.options.id_field:
        return []
    rows = ((number, offset, name) for number, offset, name in _lines_of(ids_path(folder, shard_id)))
    found = [row for row in rows if row[2] or input_kind(plan.inputs[row[0]].path).format.has_fields]
    return _compare_values("kept ids", plan, expected, found, has_order=True)


def _compare_values(
    what: str, plan: Plan, expected: list[Any], found: list[Any], *, has_order: bool
) -> list[str]:
    """Compare (input, place, value) of documents. What is kept twice stands in no order, too."""
    here, there = ({row[:2]: row[2] for row in some} for some in (expected, found))
    differing = _Named(f"{what} are not those of the input")
    for place in sorted(place for place in {*here, *there} if here.get(place) != there.get(place)):
        differing.add(f"{_at(plan, place)}: {there.get(place)!r}, the input has {here.get(place)!r}")
    if len(found) > len(there) or (has_order and list(here) != list(there)):
        differing.add("they stand in another order")
    return differing.words()


def _lines_of(path: Path) -> Iterator[Any]:
    """The values of a file of JSON lines, whose hash was compared. Raises ReadWriteError."""
    with errors_named(path), path.open("rb") as file:
        yield from map(json.loads, file)
