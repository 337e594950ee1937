"""Load the engine of a plan: the fast one, if it gives the planned ids, or else the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from preprocess.make.engine import Engine
from preprocess.make.fast import equal_fast_engine
from preprocess.make.probe import ids_sha256
from preprocess.make.reference import load_tokenizer, reference_engine
from preprocess.read.formats import Texts
from shardprep.errors import OtherTokenizer, UsageError
from shardprep.format import names
from shardprep.format.data_folder import DataFolder
from shardprep.format.plan import Plan
from shardprep.format.plan_options import EngineName
from shardprep.format.planned_tokenizer import check_tokenizer_files

if TYPE_CHECKING:  # a task of one shard does without them
    pass


def load_engine(plan: Plan, folder: DataFolder, wanted: EngineName, warn: Callable[[str], None]) -> Engine:
    """Return an engine that gives the planned ids for the plan's probe.

    Raises OtherTokenizer if the tokenizer's files changed, or if even the reference gives other ids.
    Raises UsageError if ``wanted`` cannot be used.
    """
    path = folder.path_of(f"{names.TOKENIZER_DIR}/{names.TOKENIZER_FILE}")
    options = plan.options
    probe = Texts.of_strings(plan.probe)
    expected = plan.probe_sha256
    allow = options.encodes_control_tokens
    if wanted == "gigatoken" or (wanted == "auto" and plan.fast_engine_is_equal):
        has_fast_file = names.FAST_TOKENIZER_FILE in plan.tokenizer_files
        name = names.FAST_TOKENIZER_FILE if has_fast_file else names.TOKENIZER_FILE
        content = check_tokenizer_files(folder, plan.tokenizer_files, name)
        fast = equal_fast_engine(content, path, probe, expected, allow_special_tokens=allow)
        if isinstance(fast, Engine):
            return fast if options.add_special_tokens else fast.bare()
        if wanted == "gigatoken":
            raise UsageError(f"--engine {wanted} fails for {path}: {fast}; use --engine auto")
        warn(f"gigatoken cannot be used for this tokenizer ({fast}); using tokenizers, which is slower")
    content = check_tokenizer_files(folder, plan.tokenizer_files, names.TOKENIZER_FILE)
    tokenizer = load_tokenizer(path, content)
    engine = reference_engine(tokenizer, allow_special_tokens=allow, name=str(path))
    found = ids_sha256([engine.encode(probe)])
    if found != expected:
        ids = f"other ids ({found[:12]}, expected {expected[:12]}) than at planning"
        what = f"tokenizers {engine.version} encodes the plan's probe to {ids}"
        raise OtherTokenizer(f"{what}; install the version that planned, or plan again")
    return engine if options.add_special_tokens else engine.bare()
