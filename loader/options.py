"""``LoaderOptions``: the arguments of ``get_llama3_dataloader``, checked one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from loader.batch.batches import Collate, Targets
from loader.batch.fields import Boundary
from loader.order.checks import whole_number
from loader.order.planned import Sizes, Weights, WeightsIn
from loader.read.finding import InputShards, is_named_validation
from loader.read.shards import ShardSet, SplitName
from shardprep.errors import UsageError

Padding = Literal["longest", "max_length"]
_Check: TypeAlias = Callable[[str, object], object]  # (name, value) -> the value to use; raises UsageError


def _at_least(least: int) -> _Check:
    """Check a whole number. numpy's integers become int, since states are JSON."""
    return lambda name, value: whole_number(name, value, least=least)


def _one_of(*choices: object) -> _Check:
    def check(name: str, value: object) -> object:
        if value not in choices:
            raise UsageError.of_value(name, value, " or ".join(map(repr, choices)))
        return value

    return check


def _true_or_false(name: str, value: object) -> bool:
    return bool(_one_of(True, False)(name, value))


def _path(expected: str) -> _Check:
    def check(name: str, value: object) -> object:
        if not isinstance(value, (str, os.PathLike)):
            raise UsageError.of_value(name, value, expected)
        return value

    return check


def _function_of_samples(name: str, value: object) -> object:
    if not callable(value):
        raise UsageError.of_value(name, value, "a function of a list of samples")
    return value


def _or_none(check: _Check) -> _Check:
    return lambda name, value: None if value is None else check(name, value)


def _where_it_is_used(_: str, value: object) -> object:
    """Return the value. The part of the loader that uses it checks it."""
    return value


CHECKS: dict[str, _Check] = {
    "input_shards": _where_it_is_used,
    "batch_size": _at_least(1),
    "model_id": _or_none(_path("a model's folder or its name on the hub")),
    "split": _or_none(_one_of(*get_args(SplitName))),
    "global_batch_size": _where_it_is_used,
    "group_by_length": _where_it_is_used,
    "padding": _one_of(*get_args(Padding)),
    "pad_to_multiple_of": _or_none(_at_least(1)),
    "collate_fn": _or_none(_function_of_samples),
    "origins": _true_or_false,
    "seed": _at_least(-(1 << 63)),
    "shuffle": _true_or_false,
    "weights": _where_it_is_used,
    "weights_in": _one_of(*get_args(WeightsIn)),
    "amend": _true_or_false,
    "seq_len": _or_none(_at_least(1)),
    "boundaries": _where_it_is_used,
    "targets": _one_of(*get_args(Targets)),
    "max_length": _or_none(_at_least(1)),
    "num_workers": _at_least(0),
    "prefetch_factor": _or_none(_at_least(1)),
    "pin_memory": _or_none(_true_or_false),
    "persistent_workers": _true_or_false,
    "rank": _or_none(_at_least(0)),
    "world_size": _or_none(_at_least(1)),
    "cache_dir": _or_none(_path("a folder")),
}


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The arguments of ``get_llama3_dataloader``, which explains them. Raises UsageError for a wrong one."""

    input_shards: InputShards | Mapping[str, InputShards]
    batch_size: int
    model_id: str | os.PathLike[str] | None
    split: SplitName | None
    global_batch_size: Sizes | None
    group_by_length: bool | int
    padding: Padding
    pad_to_multiple_of: int | None
    collate_fn: Collate | None
    origins: bool
    seed: int
    shuffle: bool
    weights: Weights | None
    weights_in: WeightsIn
    amend: bool
    seq_len: int | None
    boundaries: Boundary | Sequence[Boundary]
    targets: Targets
    max_length: int | None
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool | None
    persistent_workers: bool
    rank: int | None
    world_size: int | None
    cache_dir: str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))

    @property
    def is_validation(self) -> bool:
        return self.split == "validation"

    @property
    def num_cut_columns(self) -> int:
        """Return how many tokens shorter than the samples ``input_ids`` and ``labels`` are."""
        return 1 if self.targets == "shifted" else 0

    @property
    def row_tokens(self) -> int | None:
        """Return the tokens of a row that is packed at load time, or None if documents are not packed."""
        return None if self.seq_len is None else self.seq_len + self.num_cut_columns

    @property
    def most_tokens(self) -> int | None:
        """Return the tokens to which documents are truncated, or None if they are not."""
        return None if self.max_length is None else self.max_length + self.num_cut_columns

    @property
    def counts_tokens(self) -> bool:
        """Return whether weights are shares of tokens, for which samples are counted by their length."""
        return self.weights is not None and self.weights_in == "tokens"

    def refuse_unshiftable(self, boundaries: Sequence[str]) -> None:
        """Raise UsageError for shifted targets beside what shifts or makes labels itself."""
        if self.targets != "shifted":
            return
        if "transformers" in boundaries:
            found = "targets='shifted' with boundaries='transformers', whose models shift labels themselves"
            expected = "other boundaries than 'transformers', or targets='same'"
            raise UsageError(found=found, expected=expected)
        if self.collate_fn is not None:
            raise UsageError("targets='shifted' does not work with a collate_fn; leave out one of the two")

    def refuse_wrong_sources(self) -> None:
        """Raise UsageError unless named sources have weights, and a source without a name has none."""
        if not isinstance(self.input_shards, Mapping):
            if self.weights is not None:
                remedy = 'input_shards={"web": ..., "code": ...}'
                raise UsageError(found="weights without named sources", expected=remedy, remedy=remedy)
            return
        if self.is_validation:
            if not is_named_validation(self.input_shards) or self.weights is not None:
                found = 'split="validation" with named sources'
                raise UsageError(found=found, expected="one loader for each source")
            return
        if self.weights is None:
            found = "named sources without weights"
            raise UsageError(found=found, expected="weights= with a weight for each")

    def refuse_no_width(self) -> None:
        """Raise UsageError for padding to a length that is not given."""
        if self.padding == "max_length" and self.max_length is None:
            found = f"padding={self.padding!r}"
            raise UsageError(found=found, expected="max_length=, the length to pad to")

    def refuse_wrong_lengths(self, shards: ShardSet, group: int) -> None:
        """Raise UsageError if the shards have rows that these arguments do not fit, or rows of many lengths.

        ``group``: samples of similar length that are next to each other.
        """
        padded_by = "group_by_length" if group > 1 else ""  # an argument for padded documents only
        if self.max_length is not None:
            padded_by = f"max_length={self.max_length}"
        if self.seq_len is not None and padded_by:
            found = f"seq_len={self.seq_len}, which packs documents, and {padded_by}, which pads them"
            raise UsageError(found=found, expected="only one of the two")
        if shards.has_rows and not shards.row_tokens:
            expected = "only documents, or only rows of one length; use a loader for each"
            raise UsageError(found="packed rows mixed with documents or with other rows", expected=expected)
        if not shards.row_tokens:
            return
        given = padded_by if self.row_tokens in (None, shards.row_tokens) else f"seq_len={self.seq_len}"
        if given:
            rows = f"packed rows of {shards.row_tokens} tokens"
            expected = f"no such argument for {rows}; plan others with --seq_len"
            raise UsageError(found=given, expected=expected, remedy="--seq_len")
