"""Invalid arguments, and what a loader detects and reports: rank, tokenizer, threads, settings.

tests/oracle/test_refusals.py has more invalid arguments.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, processors
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import loader
import shardprep
from loader import (
    NotFound,
    OtherTokenizer,
    ProcessRank,
    UsageError,
    find_process_rank,
    get_llama3_dataloader,
    set_up_training,
)
from loader.__main__ import main as show
from loader.other_loaders import ARGUMENTS
from tests import loader_reference
from tests.forged import rewrite_json
from tests.oracle.forms import SEQ_LEN, DataSets
from tests.world import BOS, EOS, World, ids_of, open_loader, refuses, tokenizer_dir

# Arguments


def rows_of(values: dict[str, tuple[Any, ...]], expected: str) -> list[tuple[dict[str, Any], str, str]]:
    """Return rows of WRONG for several arguments, given as name -> wrong values."""
    return [({name: value}, f"{name}={value!r}", expected) for name in values for value in values[name]]


# Arguments in addition to a data set, batch_size=2 and model_id; found and expected of the error.
WRONG: list[tuple[dict[str, Any], str, str]] = [
    *rows_of(
        dict.fromkeys(("shuffle", "amend", "pin_memory", "persistent_workers"), ("x",)), "True or False"
    ),
    *rows_of({"origins": ("yes", None)}, "True or False"),
    *rows_of({"batch_size": ("2", 0), "seq_len": ("16", True, 0), "max_length": (1.5,)}, "at least 1"),
    *rows_of({"prefetch_factor": (True,), "world_size": (1.0,), "global_batch_size": (8.0,)}, "at least 1"),
    *rows_of({"pad_to_multiple_of": (True, 0)}, "at least 1"),
    *rows_of({"num_workers": (True, "2", -1), "rank": (1.0,)}, "at least 0"),
    *rows_of({"group_by_length": (-4, 2.5)}, "at least 0"),
    *rows_of({"seed": (1.0,)}, "a whole number"),
    *rows_of({"model_id": (4, b"x"), "collate_fn": (5,), "cache_dir": (b"x",)}, "a "),
    ({"input_shards": [3]}, "input_shards=3", "the path of a folder"),
    ({"num_workers": 2, "prefetch_factor": 0}, "prefetch_factor=0", "at least 1"),
    ({"boundaries": True}, "boundaries=[True]", "position_ids"),
    ({"boundaries": None}, "boundaries=[None]", "position_ids"),
    ({"group_by_length": 8, "global_batch_size": 8, "rank": 0, "world_size": 4}, "4 ranks", "[1]"),
    ({"seq_len": 8, "group_by_length": True}, "seq_len=8", ""),
    ({"split": "validation", "global_batch_size": [(0, 4), (3, 8)]}, "global_batch_size=[", "one size"),
    ({"global_batch_size": [(0, 100), (10, 64)], "rank": 0, "world_size": 4}, "=100 from step 0", "8"),
    ({"targets": "shifted", "seq_len": 10**6}, f"seq_len={10**6}", "at most"),
    ({"targets": "shifted", "seq_len": 8, "max_length": 4}, "seq_len=8, which", ""),
    ({"targets": "shifted", "max_length": 4, "seq_len": 8}, "max_length=4, which", ""),
    # Arguments that exclude each other. These errors have no fields, but name the last argument.
    ({"boundaries": "position_ids", "seq_len": 8, "collate_fn": list}, "", ""),
    ({"origins": True, "collate_fn": list}, "", ""),
    ({"targets": "shifted", "seq_len": 8, "collate_fn": list}, "", ""),
    ({"group_by_length": 2, "shuffle": False}, "", ""),
    ({"split": "validation", "group_by_length": 2}, "", ""),
]


@pytest.mark.parametrize(("options", "found", "expected"), WRONG, ids=[str(options) for options, *_ in WRONG])
def test_a_wrong_value_is_named(numbered: Path, options: dict[str, Any], found: str, expected: str) -> None:
    given: dict[str, Any] = {"input_shards": numbered, "batch_size": 2, "model_id": numbered, **options}
    with refuses(UsageError, found=found, expected=expected, args="" if found else [*options][-1]):
        get_llama3_dataloader(**{"num_workers": 0, **given})


@pytest.mark.parametrize("name", ["seq_len", "max_length"])
def test_a_length_that_does_not_fit_packed_rows_is_named_as_it_was_typed(rows: Path, name: str) -> None:
    with refuses(UsageError, found=f"{name}=50", expected="packed rows of 97 tokens"):
        open_loader(rows, 2, targets="shifted", **{name: 50})


@pytest.mark.parametrize("name", ["get_loader", "numpy"])
def test_an_unknown_name_of_the_package_is_an_attribute_error_with_all_names(name: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(loader, name)
    assert {name, *loader.__all__} <= set(re.findall(r"\w+", str(raised.value)))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_another_loader_is_refused_with_what_to_do_instead(name: str) -> None:
    make: Any = get_llama3_dataloader
    with pytest.raises(TypeError) as raised:
        make("DATA", 4, **{name: 1})
    assert name in str(raised.value)
    assert ARGUMENTS[name] in str(raised.value)


def test_each_argument_is_documented_once_and_the_reference_page_is_up_to_date() -> None:
    groups = loader_reference.arguments_by_group()
    explained = [name for arguments in groups.values() for name in arguments]
    assert sorted(explained) == sorted(inspect.signature(get_llama3_dataloader).parameters)
    assert len(groups) == 5
    assert all(text.endswith((".", "``.")) for arguments in groups.values() for text in arguments.values())
    found = loader_reference.PAGE.read_text("utf-8")
    assert found == loader_reference.page(), "run: python -m tests.loader_reference"
    assert shardprep.get_llama3_dataloader is get_llama3_dataloader


def test_a_model_that_cannot_be_loaded_is_named(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotFound) as raised:
        open_loader(numbered, model_id="nobody/nothing-at-all")
    assert "nobody/nothing-at-all" in str(raised.value)


@pytest.mark.processes
def test_a_dataloader_made_from_the_loader_is_refused(numbered: Path) -> None:
    """accelerate and Lightning make one, and so do users who take the loader for a data set."""
    with open_loader(numbered, model_id=numbered) as made:
        itself: Any = made
        names = ("run", "samples", "step_batches", "loader_tokenizer", "process_rank", "pin_memory")
        shown = {name: vars(made)[name] for name in names}
        assert len(type(made)(**shown)) == len(made)
        for remake in (
            lambda: DataLoader(itself),
            lambda: DataLoader(itself, batch_size=4, sampler=range(8)),
            lambda: DataLoader(made.dataset, batch_size=made.batch_size, num_workers=1),
            lambda: type(made)(**shown, sampler=None),
            lambda: itself.dataset[0],
        ):
            with refuses(UsageError):
                next(iter(remake()))
        assert len([*made]) == len(made)


def test_numpy_numbers_and_paths_as_bytes_are_accepted(numbered: Path) -> None:
    two, eight, zero, yes = np.int64(2), np.int64(8), np.int64(0), np.bool_(True)
    plain: dict[str, Any] = {"max_length": 2, "seed": 8, "global_batch_size": [(0, 2), (8, 8)]}
    plain |= {"pad_to_multiple_of": 8, "shuffle": True}
    given = {"max_length": two, "seed": eight, "global_batch_size": [(zero, two), (eight, eight)]}
    given |= {"pad_to_multiple_of": eight, "shuffle": yes}
    states = []
    for folder, size, options in ((numbered, 2, plain), (os.fsencode(numbered), two, given)):
        with get_llama3_dataloader(folder, size, numbered, num_workers=0, **options) as made:
            states.append(json.dumps([ids_of(made.peek()), made.state_dict()]))
    assert states[0] == states[1]


# Ranks

SRUN = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
SRUN |= {"SLURM_PROCID": "3"}
BATCH_SCRIPT = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_RANK": "5"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}
FIRST_OF_ONE = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
# Variables of launchers, and the rank and world size; None: refused, because the rank is uncertain.
RANKS: dict[str, tuple[dict[str, str], tuple[int, int] | None]] = {
    "a task of srun": (SRUN, (3, 4)),
    "the step's tasks count, not the job's": ({**SRUN, "SLURM_NTASKS": "8"}, (3, 4)),
    "a batch script is alone": (BATCH_SCRIPT, (0, 1)),
    "salloc's shell is alone": ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"}, (0, 1)),
    "an interactive step is alone": ({**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}, (0, 1)),
    "a step of one task is alone": ({**SRUN, **FIRST_OF_ONE}, (0, 1)),
    "handed into a container without a job id": ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
    "torchrun within srun": ({**SRUN, **TORCHRUN}, (1, 2)),
    "nothing is set": ({}, (0, 1)),
    "Open MPI": (OPEN_MPI, (5, 8)),
    "MPICH": (MPICH, (2, 3)),
    "mpirun's ranks, where Slurm started a task per node": ({**SRUN, **OPEN_MPI}, (5, 8)),
    "MPICH in a Slurm job": ({**SRUN, **MPICH}, (2, 3)),
    "torchrun under mpirun": ({**OPEN_MPI, **TORCHRUN}, (1, 2)),
    "PMIx by srun": ({**SRUN, "PMIX_RANK": "3"}, (3, 4)),
    "PMIx by srun, alone": ({**SRUN, **FIRST_OF_ONE, "PMIX_RANK": "0"}, (0, 1)),
    "task 2 without a step: task 0 would be taken as alone": ({**BATCH_SCRIPT, "SLURM_PROCID": "2"}, None),
    "no procid": ({name: value for name, value in SRUN.items() if name != "SLURM_PROCID"}, None),
    "no number": ({"RANK": "one", "WORLD_SIZE": "2"}, None),
    "PMIx alone": ({"PMIX_RANK": "0"}, None),
    **{f"half: {name}": ({name: "1"}, None) for name in (*TORCHRUN, *MPICH, *list(OPEN_MPI)[:2])},
}


@pytest.mark.parametrize("name", RANKS)
def test_a_rank_comes_from_arguments_or_else_from_the_launcher(name: str) -> None:
    environ, expected = RANKS[name]
    with refuses(UsageError) if expected is None else contextlib.nullcontext():
        who = find_process_rank(environ=environ)
        assert (who.rank, who.world_size) == expected
    given = ProcessRank(rank=5, world_size=8, source="arguments", is_passed=True)
    assert find_process_rank(5, 8, environ) == given


@pytest.mark.parametrize("environ", [TORCHRUN, SRUN, OPEN_MPI, MPICH])
def test_a_loader_refuses_to_run_if_its_process_has_become_another_rank(
    numbered: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    alone = open_loader(numbered, model_id=numbered)
    given = open_loader(numbered, model_id=numbered, rank=0, world_size=1)
    iter(alone)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with refuses(UsageError):
        iter(alone)
    iter(given)  # a rank that was passed is not checked
    late = open_loader(numbered, model_id=numbered)
    monkeypatch.undo()
    iter(late)  # there are no variables that disagree


# Tokenizers


@pytest.fixture
def data(sets: DataSets, tmp_path: Path) -> Path:
    """A copy of documents, to change."""
    return Path(shutil.copytree(sets["documents"], tmp_path / "data"))


CHANGES: dict[str, Callable[[Path], object]] = {
    "another EOS": lambda folder: rewrite_json(folder / "tokenizer_config.json", eos_token=BOS),
    "two ids exchanged": lambda folder: rewrite_json(
        folder / "tokenizer.json", **{"model.vocab.!": 1, 'model.vocab."': 0}
    ),
    "no configuration": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "a file of more tokens": lambda folder: (folder / "added_tokens.json").write_text('{"<|new|>": 700}'),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tokenizer_that_differs_from_the_manifests_is_refused(data: Path, change: str) -> None:
    """transformers silently loads an altered file, or another one if it cannot read a file."""
    CHANGES[change](data / "tokenizer")
    with pytest.raises(OtherTokenizer) as raised:
        open_loader(data)
    assert str(data / "tokenizer") in str(raised.value)


def test_the_tokenizer_of_the_data_set_is_used_and_a_model_must_be_equal(data: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tokenizer_dir(), tmp_path / "model")
    for model_id in (None, tokenizer_dir(), str(tokenizer_dir()), model):
        with open_loader(data, model_id=model_id) as loader:
            assert Path(loader.tokenizer.name_or_path) == data / "tokenizer"
            expected = loader.tokenizer.eos_token_id
    # The model name that the data set was made with is not resolved.
    rewrite_json(data / "index.json", **{"spec.tokenizer.model_id": "meta-llama/not-downloaded"})
    open_loader(data, model_id="meta-llama/not-downloaded").close()
    # A model with another EOS pads and ends documents as the manifests state.
    shutil.rmtree(data / "tokenizer")
    rewrite_json(Path(model) / "tokenizer_config.json", eos_token=BOS)
    with open_loader(data, model_id=model) as loader:
        assert loader.tokenizer.eos_token_id == expected


@pytest.mark.parametrize("is_of_transformers_4", [False, True])
def test_a_loader_loads_its_tokenizer_by_transformers_on_first_access(
    data: Path, monkeypatch: pytest.MonkeyPatch, is_of_transformers_4: bool
) -> None:
    folder, asked, real = data / "tokenizer", [], AutoTokenizer.from_pretrained
    if is_of_transformers_4:  # it wrote added tokens into the configuration, too
        tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        added = {str(token.pop("id")): token for token in tokens}
        rewrite_json(folder / "tokenizer_config.json", added_tokens_decoder=added)
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda name, **options: asked.append(name) or real(name, **options)
    )
    with open_loader(data, 2) as loader:
        batch = next(iter(loader))
        assert asked == []
        tokenizer = loader.tokenizer
        assert loader.tokenizer is tokenizer
    assert (len(asked), tokenizer.name_or_path) == (1, str(folder))
    known = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    known.pad_token = tokenizer.pad_token
    text = f"하늘과 바다 {EOS} of the moon"
    assert (repr(tokenizer), tokenizer(text)) == (repr(known), known(text))
    assert tokenizer.special_tokens_map == known.special_tokens_map
    assert (batch["input_ids"][batch["attention_mask"] == 0] == tokenizer.pad_token_id).all()


# Logs


def logged(caplog: pytest.LogCaptureFixture, data: Path, **options: Any) -> list[tuple[int, str]]:
    """Return (level, message) of the records that making a loader logs."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "loader"):
        open_loader(data, **options).close()
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_only_rank_0_logs_the_settings_of_a_loader(caplog: pytest.LogCaptureFixture, sets: DataSets) -> None:
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "world_size": 2}
    with open_loader(sets["documents"], rank=0, **options) as loader:
        described = loader.describe()
        assert repr(loader) in described
    assert (logging.INFO, described) in logged(caplog, sets["documents"], rank=0, **options)
    assert not [text for _, text in logged(caplog, sets["documents"], rank=1, **options) if "\n" in text]


# append_eos, the tokenizer's template, arguments of the loader; number of warnings of plan and of the loader.
EOS_CASES: list[tuple[bool, str | None, dict[str, Any], int, int]] = [
    (False, None, {}, 1, 1),
    (False, "$A </s>", {}, 0, 0),
    (False, "</s> $A", {"max_length": 4}, 1, 1),
    (True, None, {}, 0, 0),
    (False, None, {"seq_len": 2}, 1, 0),
    (False, None, {"rank": 1, "world_size": 2}, 1, 0),
    (False, None, {"split": "validation"}, 1, 0),
]


@pytest.mark.parametrize(("append_eos", "template", "options", "of_plan", "of_loader"), EOS_CASES)
def test_plan_and_rank_0_warn_if_training_documents_get_no_eos(
    caplog: pytest.LogCaptureFixture, tmp_path: Path,
    append_eos: bool, template: str | None, options: dict[str, Any], of_plan: int, of_loader: int,
) -> None:  # fmt: skip
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<pad>": 2}, "a"))
    if template is not None:
        words.post_processor = processors.TemplateProcessing(template, special_tokens=[("</s>", 1)])
    model = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")
    model.save_pretrained(tmp_path / "model")
    world = World(tmp_path, tokenizer=tmp_path / "model").raw({"a.txt": "a\n" * 8})
    planned = world.try_plan(num_shards=1, append_eos=append_eos or None)
    assert planned.text.count("--append_eos") == of_plan
    world.run(0).verify()
    folder: Any = {"validation": world.data_dir} if "split" in options else world.data_dir
    levels = [level for level, _ in logged(caplog, folder, **options)]
    assert levels.count(logging.WARNING) == of_loader


def test_a_set_that_holds_nothing_out_is_for_validation_only_if_somebody_said_so(tmp_path: Path) -> None:
    """By a name in the call, by its folder's name, or by the split that was planned."""
    text = {"a.txt": "of a kettle\n" * 20, "x-validation.txt": "of a lake\n" * 20}
    world = World(tmp_path).raw(text).make(num_shards=1)
    planned = World(tmp_path, data_dir=tmp_path / "a side").make(num_shards=1, split="validation")
    named = World(tmp_path, data_dir=tmp_path / "web_val").make(num_shards=1)
    refused: list[Any] = [
        world.data_dir,
        [named.data_dir, world.data_dir],
        [world.data_dir / "shard-00000.tar"],
    ]
    for wrong in refused:
        with refuses(UsageError, path=world.data_dir, remedy='input_shards={"validation": '):
            open_loader(wrong, 4, split="validation")
    with refuses(UsageError):
        open_loader({"web": world.data_dir}, 4, split="validation")
    for right, count in ((named.data_dir, 40), (planned.data_dir, 20), ({"validation": world.data_dir}, 40)):
        with open_loader(right, 4, split="validation") as loader:
            assert (loader.run.is_validation, loader.source_names) == (True, ("all",))
            assert sum(len(batch["input_ids"]) for batch in loader) == count


def test_python_m_loader_prints_a_decoded_batch(sets: DataSets, capsys: pytest.CaptureFixture[str]) -> None:
    assert show([str(sets["documents"]), "--batch_size", "3"]) == 0
    out = capsys.readouterr().out
    with open_loader(sets["documents"], 3) as loader:
        first = ids_of(next(iter(loader)))[0]
        assert f"{len(loader):,} batches" in out
        assert repr(loader.tokenizer.decode(first)) in out
    assert re.search(r"input_ids: int64\[3, \d+\]", out)
    assert show([str(sets["documents"] / "nowhere")]) == 66


# set_up_training

VARIABLES = "OMP_NUM_THREADS MKL_NUM_THREADS TOKENIZERS_PARALLELISM LOCAL_WORLD_SIZE TORCHELASTIC_RUN_ID"


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """This process's variables without those that count here. Everything is restored at the end."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    precision = torch.get_float32_matmul_precision()
    with mock.patch.dict(os.environ):
        for name in VARIABLES.split():
            os.environ.pop(name, None)
        yield os.environ
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def tokenizer(numbered: Path) -> Any:
    return AutoTokenizer.from_pretrained(numbered)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 12),
        ({"LOCAL_WORLD_SIZE": "4"}, 3),
        ({"LOCAL_WORLD_SIZE": "99"}, 1),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}, 6),
        ({"OMP_NUM_THREADS": "1"}, 1),
    ],
)
def test_threads_are_the_ranks_share_of_the_cpus(
    tokenizer: Any, environ: Any, given: dict[str, str], expected: int
) -> None:
    environ.update(given)
    assert set_up_training(tokenizer).num_threads == expected == torch.get_num_threads()
    assert {name: environ[name] for name in given} == given, "variables of the user stay"
    assert environ["TOKENIZERS_PARALLELISM"] == "false"
    assert environ["MKL_NUM_THREADS"] == str(expected)
    with refuses(UsageError, found="num_threads=0"):
        set_up_training(tokenizer, num_threads=0)


def test_set_up_training_pads_as_the_loader_does_and_leaves_cpus_to_workers(
    numbered: Path, environ: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with open_loader(numbered, model_id=numbered, num_workers=3) as loader:
        loader.tokenizer.padding_side = "left"
        setup = set_up_training(loader)
        assert setup.num_threads == 9
        assert loader.tokenizer.padding_side == "right"
        assert loader.tokenizer.pad_token_id == setup.pad.token_id == loader.collate_fn.pad.token_id
        assert not caplog.records
        loader.tokenizer.pad_token = loader.tokenizer.eos_token
        for tf32, precision in ((True, "high"), (False, "highest")):
            set_up_training(loader.tokenizer, tf32=tf32)
            assert torch.get_float32_matmul_precision() == precision
        assert {record.levelname for record in caplog.records} == {"WARNING"}, "the pad token is EOS"


def test_bf16_applies_only_in_autocast_and_needs_a_gpu_that_supports_it(
    tokenizer: Any, environ: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, ones = torch.nn.Linear(8, 8), torch.ones(1, 8)
    for bf16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        setup = set_up_training(tokenizer, bf16=bf16, num_threads=1)
        assert setup.model_options == {"attn_implementation": "sdpa"}
        with setup.autocast():
            assert layer(ones).dtype == dtype
        assert layer(ones).dtype == layer.weight.dtype == torch.float32
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "An old GPU")
    with refuses(UsageError):
        set_up_training(tokenizer, bf16=True)
