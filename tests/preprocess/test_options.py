"""Options as flags, as a configuration and in plan.json are the same, also between versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.__main__ import PROGRAM
from shardprep.command_line import given_of
from shardprep.errors import BrokenShard, UsageError
from shardprep.format.json_files import as_type
from shardprep.format.options import PLAN_FIELDS, PlanOptions, PrepConfig, flags_of, option_differences

FLAGS = [item.name for item in PLAN_FIELDS if item.metadata["help"]]
KINDS = get_type_hints(PlanOptions)
VALUES: dict[str, Any] = {
    "encoding": st.sampled_from(["utf-8", "cp949", "UTF-16", "latin-1"]),
    "text_template": st.sampled_from(["", "{a} {b}"]),
    "validation_fraction": st.sampled_from([0.0, 0.005, 0.5]),
    "zstd_long": st.sampled_from([0, 10, 31]),
    "seq_len": st.sampled_from([1, 16, 8192]),
    "also": st.sampled_from(["", "*.md,README"]),
}
FIELD_NAMES = st.sampled_from(["text", "a", "a.b"])


def values_of(name: str) -> Any:
    kind = KINDS[name]
    if name in VALUES or kind is str:
        return VALUES.get(name, FIELD_NAMES)
    if kind is bool:
        return st.booleans()
    return st.integers(0, 9) if kind is int else st.sampled_from(get_args(kind))


@st.composite
def plan_options(draw: Any) -> PlanOptions:
    """Some options given, at random; those that do not go together are left out."""
    options = PlanOptions()
    given: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(FLAGS), max_size=6, unique=True)):
        try:
            options = PrepConfig(**given, **{name: draw(values_of(name))}).plan_options()
        except UsageError:
            continue
        given[name] = getattr(options, name)
    return options


def read(data: dict[str, Any]) -> PlanOptions:
    return as_type(Path("plan.json"), data, PlanOptions)


@given(plan_options())
def test_options_are_the_same_in_plan_json_and_on_a_command_line(options: PlanOptions) -> None:
    assert read(options.to_json()) == options
    words = ["plan", *flags_of(options)]
    config = PrepConfig(**given_of(PROGRAM.parse(words), PrepConfig))
    assert config.plan_options() == options
    assert PlanOptions(**vars(options)) == options, "what is settled stays so"


@given(plan_options())
def test_an_option_that_is_not_used_is_no_part_of_an_identity(options: PlanOptions) -> None:
    usual = PlanOptions(record=options.record)
    used = {name for name in vars(usual) if getattr(options, name) != getattr(usual, name)}
    assert options.identity().keys() <= used | {"record"}
    assert read(options.identity()).identity() == options.identity()


@given(plan_options(), plan_options())
def test_options_of_one_identity_differ_only_in_how_inputs_are_found(
    one: PlanOptions, other: PlanOptions
) -> None:
    names = {item.name for item in PLAN_FIELDS}
    assert (one.identity() == other.identity()) == (option_differences(one, other, names) == [])
    assert (one == other) == (option_differences(one, other) == [])


@given(plan_options(), st.data())
def test_a_value_of_another_type_is_refused_by_its_name(options: PlanOptions, data: Any) -> None:
    name = data.draw(st.sampled_from(sorted({*options.to_json()} - {"validation_fraction"})))
    wrong = data.draw(st.sampled_from([None, [], 1.5, -1, "\0", {}]))
    with pytest.raises((BrokenShard, UsageError)) as caught:
        read({**options.to_json(), name: wrong})
    assert name in str(caught.value)


def test_what_depends_on_the_record_has_its_default() -> None:
    documents, packed = PlanOptions(), PlanOptions(record="packed")
    assert (documents.keep_text, documents.append_eos, documents.seq_len) == (True, False, 0)
    assert (packed.keep_text, packed.append_eos, packed.seq_len) == (False, True, 8192)
    assert packed.token_format == "npy"
