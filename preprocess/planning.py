"""A folder for what planning tries out, gone afterwards.

Makes a plan: lists inputs, resolves the tokenizer, tests the engines, cuts, measures, freezes.

What a plan will cost, measured on a sample of its own input with its own pipeline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

import lustre
from preprocess.documents import ByteRange, DocumentBatch, read_documents
from preprocess.engines import (
    Engine,
    can_be_cut,
    equal_fast_engine,
    ids_sha256,
    probe_texts,
    tokenizers_engine,
)
from preprocess.inputs import InputFile, list_inputs, next_line_start, stamp_inputs
from preprocess.long_documents import LongDocument
from preprocess.options import BATCH_BYTES, PrepConfig
from preprocess.plan import Plan, plan_differences, plan_id, publish_plan, read_plan, with_hashes
from preprocess.shard_cuts import Cut, check_num_shards, even_cuts, file_cuts, files_can_be_cut
from preprocess.shard_writer import ShardWriter
from preprocess.tokenizer_files import (
    MAX_TOKENIZER_BYTES,
    TOKENIZER_FILE,
    publish_tokenizer,
    resolve_tokenizer,
    stamp_tokenizer,
)
from shardprep.atomic_files import STALE_AFTER_S, remove_temporaries
from shardprep.errors import CannotWrite, Refused, UsageError
from shardprep.format.dataset_spec import TokenizerSpec
from shardprep.format.names import INDEX_NAME, OSTS_NAME, PLAN_NAME, TOKENIZER_DIR
from shardprep.regular_files import read_regular


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder under TMPDIR for the time of a ``with``. Raises CannotWrite where none can be made."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardprep-"))
    except OSError as error:
        raise CannotWrite(
            f"no scratch folder can be made: {error.strerror}; let TMPDIR name a folder with some space"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_MANY_SHARDS = 1000  # more, each smaller than half of _SHARD_BYTES, and the plan command speaks of it
_SHARD_BYTES = 256 << 20  # of input: minutes of one core


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How many shards: a number, a size of input bytes, or (neither) one a file."""

    num_shards: int | None = None
    shard_bytes: int | None = None


def make_plan(
    config: PrepConfig,
    sharding: Sharding,
    *,
    stripe: str = "none",
    dry_run: bool = False,
    say: Callable[[str], None],
) -> tuple[Plan, CostEstimate]:
    """Plan a data set and, unless ``dry_run``, freeze plan and tokenizer in its folder.

    ``stripe`` (auto, none or a number) is the Lustre layout of a folder without a plan yet.

    Where the folder has a plan already, the new one is compared with it and never written.
    Raises every ShardprepError that the inputs, the tokenizer or the folder give reason for.
    """
    try:
        lustre.check_stripe(stripe)
    except lustre.LustreError as error:
        raise UsageError(str(error)) from None
    paths = list_inputs(config.input_dir, recursive=config.recursive)
    say(f"{len(paths)} input file(s) in {config.input_dir}")
    inputs = stamp_inputs(config.input_dir, paths)
    cuts = _cuts(config, inputs, sharding)
    with scratch_folder() as files:
        tokenizer = resolve_tokenizer(config.model_id, files)
        if config.append_eos and tokenizer.eos_token_id is None:
            raise UsageError(
                f"the tokenizer of {config.model_id} names no eos_token, so documents cannot end with one; "
                "add --no-append_eos, or set eos_token in its tokenizer_config.json"
            )
        plan, engine = _plan_of(config, inputs, cuts, tokenizer, files / TOKENIZER_FILE, say)
        if config.hash_inputs:
            plan = with_hashes(plan)
        estimate = measure(plan, engine)
        if dry_run:
            frozen = read_plan(config.output_dir)
            if frozen is not None and frozen.plan_id != plan.plan_id:
                raise Refused(
                    f"{config.output_dir} has another plan: {'; '.join(plan_differences(frozen, plan))}"
                )
            return plan, estimate
        frozen = _prepare_folder(config.output_dir, stripe, say)
        if frozen is None:
            stamps = publish_tokenizer(files, config.output_dir, tokenizer, None)
            plan = dataclasses.replace(plan, tokenizer_files=stamps)
        frozen = publish_plan(plan, config.output_dir)
        # It holds what the plan names, whoever planned meanwhile, or damaged it since.
        publish_tokenizer(files, config.output_dir, tokenizer, frozen.tokenizer_files)
        return frozen, estimate


def small_shards_note(plan: Plan, sharding: Sharding) -> str | None:
    """What to type where one file a shard, which nobody asked for, makes many small shards; else None."""
    total = sum(plan.shard_bytes())
    fewer = max(1, round(total / _SHARD_BYTES))
    if sharding != Sharding() or plan.num_shards < _MANY_SHARDS or plan.num_shards < 2 * fewer:
        return None
    return (
        f"each of {plan.num_shards} input files is a shard of its own, {total / plan.num_shards / 1e6:.3g} "
        f"MB on average: {plan.num_shards} tasks, {3 * plan.num_shards} files; for even shards plan into a "
        f"new folder with --num_shards {fewer}"
    )


def _prepare_folder(folder: Path, stripe: str, say: Callable[[str], None]) -> Plan | None:
    """Make the output folder and lay it out; returns the plan that it has already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"--output_dir {folder} cannot be made: {error.strerror}") from None
    for stem in (PLAN_NAME, INDEX_NAME, OSTS_NAME, TOKENIZER_DIR):
        remove_temporaries(folder, stem, older_than_s=STALE_AFTER_S)
    if (frozen := read_plan(folder)) is None and stripe != "none":
        try:
            say(lustre.apply_stripe(folder, stripe))
        except lustre.LustreError as error:
            raise CannotWrite(str(error)) from None
    return frozen


def _cuts(config: PrepConfig, inputs: list[InputFile], sharding: Sharding) -> list[Cut]:
    num_bytes = sum(item.num_bytes for item in inputs)
    if sharding.num_shards is None and sharding.shard_bytes is None:
        check_num_shards(len(inputs), num_bytes)
        return file_cuts(inputs)
    num_shards = sharding.num_shards
    if num_shards is None:
        assert sharding.shard_bytes is not None
        if sharding.shard_bytes < 1:
            raise UsageError(f"--shard_bytes is {sharding.shard_bytes}, expected at least 1")
        num_shards = max(1, -(-num_bytes // sharding.shard_bytes))
    check_num_shards(num_shards, num_bytes)
    cut_files = files_can_be_cut(config.bytes_options())
    return even_cuts(config.input_dir, inputs, num_shards, cut_files=cut_files)


def _plan_of(
    config: PrepConfig,
    inputs: list[InputFile],
    cuts: list[Cut],
    tokenizer: TokenizerSpec,
    tokenizer_json: Path,
    say: Callable[[str], None],
) -> tuple[Plan, Engine]:
    """The plan, with the engines' self-check, and the engine that workers will use."""
    allow = config.allow_special_tokens
    reference = tokenizers_engine(tokenizer_json, allow_special_tokens=allow)
    probe = probe_texts(tokenizer_json)
    probe_sha256 = ids_sha256([reference.encode(probe)])
    options = config.bytes_options()
    plan = Plan(
        plan_id=plan_id(options, tokenizer, probe_sha256, inputs, cuts),
        input_dir=config.input_dir.resolve(),
        options=options,
        max_bad_fraction=config.max_bad_fraction,
        tokenizer=tokenizer,
        tokenizer_files=stamp_tokenizer(tokenizer_json.parent),
        probe=probe,
        probe_sha256=probe_sha256,
        fast_engine_is_equal=False,
        can_be_cut=can_be_cut(orjson.loads(read_regular(tokenizer_json, max_bytes=MAX_TOKENIZER_BYTES))),
        inputs=inputs,
        cuts=cuts,
    )
    if config.engine == "tokenizers":
        return plan, reference
    texts = [*probe, *sample_texts(plan, num_bytes=1 << 18)]
    fast = equal_fast_engine(
        tokenizer_json,
        allow_special_tokens=allow,
        texts=texts,
        expected_sha256=ids_sha256([reference.encode(texts)]),
    )
    if isinstance(fast, Engine):
        return dataclasses.replace(plan, fast_engine_is_equal=True), fast
    say(f"fastokens is not used for this tokenizer ({fast}); tokenizers encodes, several times slower")
    return plan, reference


_NUM_PLACES = 8  # of the input that are sampled
_SAMPLE_BYTES = 2 << 20  # in all
_STARTUP_S = 3.0  # a task's Python and tokenizer, generously
LONG_SHARD_S = 600.0


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """Figures of the whole plan, scaled up from the sample."""

    num_tokens: int
    output_bytes: int
    core_hours: float
    longest_shard_s: float  # on one core
    num_useful_cores: int  # of a task: more of them would wait for its slowest serial stage


def sample_texts(plan: Plan, *, num_bytes: int) -> list[str]:
    """Documents from evenly spread places of the input."""
    return [text for batch in _sample(plan, num_bytes) for text in batch.texts]


def _documents(plan: Plan, ranges: list[ByteRange]) -> Iterator[DocumentBatch | LongDocument]:
    options = plan.options
    return read_documents(ranges, doc=options["doc"], encoding=options["encoding"], batch_bytes=BATCH_BYTES)


def _sample(plan: Plan, num_bytes: int) -> Iterator[DocumentBatch]:
    """Documents of the sample; of a very long one, the beginning."""
    ranges = list(_sample_ranges(plan, num_bytes // _NUM_PLACES))
    for item in _documents(plan, ranges):
        if isinstance(item, DocumentBatch):
            yield item
            continue
        with contextlib.suppress(UnicodeDecodeError):
            text = next(item.text(), "")
            yield DocumentBatch(
                texts=[text],
                lines=np.array([item.line]),
                source=item.source,
                source_offsets=np.array([item.start]),
                num_lines=1,
                num_bytes=len(text.encode()),
            )


def _sample_ranges(plan: Plan, num_bytes: int) -> Iterator[ByteRange]:
    """Whole lines from evenly spread places; whole files where files are never cut."""
    cut_files = files_can_be_cut(plan.options)
    total = sum(item.num_bytes for item in plan.inputs)
    targets = iter([total * place // _NUM_PLACES for place in range(_NUM_PLACES)])
    target, begin = next(targets), 0
    for source, item in enumerate(plan.inputs):
        end = begin + item.num_bytes
        while target < end:
            path = plan.input_dir / item.path
            start = next_line_start(path, target - begin) if cut_files else 0
            stop = item.num_bytes
            if cut_files:
                stop = next_line_start(path, min(start + num_bytes, item.num_bytes))
            if start < stop:
                yield ByteRange(source=source, path=path, start=start, end=stop)
            target = next(targets, total)
            if not cut_files:
                target = max(target, end)
        begin = end


def measure(plan: Plan, engine: Engine) -> CostEstimate:
    """Run a sample through the worker's own stages into a scratch folder and scale it up.

    Times are CPU seconds of one core of this machine; a cluster's node will differ.
    """
    sources = [item.path for item in plan.inputs]
    with (
        scratch_folder() as folder,
        ShardWriter(folder, plan.spec, 0, options=plan.options, sources=sources) as writer,
    ):
        num_bytes = 0
        read_s = encode_s = write_s = 0.0  # of CPU
        batches = _sample(plan, _SAMPLE_BYTES)
        at = time.process_time()
        for batch in batches:
            at, read_s = _add_cpu(at, read_s)
            tokens = engine.encode(batch.texts)
            at, encode_s = _add_cpu(at, encode_s)
            writer.append(batch, tokens)
            at, write_s = _add_cpu(at, write_s)
            num_bytes += batch.num_bytes
        manifest = writer.commit({})
    shard_bytes = plan.shard_bytes()
    cpu_s = read_s + encode_s + write_s
    scale = sum(shard_bytes) / max(1, num_bytes)
    return CostEstimate(
        num_tokens=round(writer.num_tokens * scale),
        output_bytes=round((manifest.tar.num_bytes + manifest.idx.num_bytes) * scale),
        core_hours=(cpu_s * scale + _STARTUP_S * plan.num_shards) / 3600,
        longest_shard_s=cpu_s * max(shard_bytes) / max(1, num_bytes) + _STARTUP_S,
        # Reading and writing take a thread each, encoding as many as there are.
        num_useful_cores=max(1, round(cpu_s / max(read_s, write_s, 1e-9))) if num_bytes else 1,
    )


def _add_cpu(since_s: float, total_s: float) -> tuple[float, float]:
    now = time.process_time()
    return now, total_s + now - since_s
