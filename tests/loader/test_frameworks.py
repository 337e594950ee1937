"""Training frameworks in real process groups: the same global batches, unbroken or resumed on another world.

What accelerate looks for on a loader are internals of it; these tests hold them.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from tests.attention_families import small_model
from tests.children import run_child
from tests.documented import examples_of
from tests.framework_pages import GLOBAL_BATCH, NEEDS, code_of
from tests.oracle.forms import SEQ_LEN, DataSets
from tests.world import open_loader

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.processes, pytest.mark.frameworks]

STEPS = 107 // GLOBAL_BATCH  # of an epoch of 107 samples
STOP, LATER, END = 7, STEPS + 2, STEPS + 9  # inside of the first epoch, and of the second
# Of a page: ranks, samples of a batch, and the first and last step. The three last have one checkpoint.
PAGE_RUNS = {"whole": (1, 1, 0, END), "stopped": (2, 2, 0, STOP), "resumed": (1, 8, STOP, LATER),
             "again": (2, 4, LATER, END)}  # fmt: skip

# The libraries are imported once, then the ranks of each world are forked with the variables of a launcher.
SCRIPT = """
import itertools, json, os, pathlib, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
import loader as loader_package
from loader import check_boundaries, get_llama3_dataloader, mask_documents
from loader.boundaries import sdpa_mask
from loader.trainer import LoaderMixin
from shardprep.errors import Refused, UsageError
from tests.attention_families import small_model
from tests.children import free_port
from tests.framework_pages import run_page

torch.set_num_threads(1)
DATA, OUT = sys.argv[1:3]
STOP, LATER, END = json.loads(sys.argv[4])
kept = []

def make_model(seen):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=200, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16)
    model = LlamaForCausalLM(config)
    def look(module, args, fields):
        if module.training:
            pairs = zip(fields["input_ids"], fields["attention_mask"])
            seen.append([ids[:mask.sum()].tolist() for ids, mask in pairs])
    model.register_forward_pre_hook(look, with_kwargs=True)
    return model

def train_by_page(run, seen):
    torch.set_num_threads(1)
    if run["page"] in ("own_loop", "fsdp2", "deepspeed"):
        dist.init_process_group("gloo")
    model = make_model(seen)
    if run["page"] == "own_loop":  # whose steps go side by side: no rank may find the other's checkpoint
        model = torch.nn.parallel.DistributedDataParallel(model)
    names = {"DATA": DATA, "model": model, "rank": int(os.environ["RANK"])}
    run_page(
        run["page"], names, checkpoint=f"{OUT}/{run['checkpoint']}", num_steps=run["last"],
        batch_size=run["batch_size"], num_ranks=run["world"], num_workers=run["workers"],
    )
    keep_weights(run, model)
    if run["page"] == "trainer":
        epoch = names["trainer"].state.epoch
        assert abs(epoch - run["last"] / 13) < 1e-9, f"epoch is {epoch} after step {run['last']}"
    kept.append(names)  # where DDP ends it holds the GIL and waits for gloo, which may want it: examples/
    if dist.is_initialized():
        dist.destroy_process_group()

def keep_weights(run, model):
    parameters = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
    path = pathlib.Path(f"{OUT}/{run['name']}.weights")
    path.write_text(json.dumps([each.detach().flatten().tolist() for each in parameters]))

def train_by_hand(run, seen):
    # Gradient descent on the mean over the labels of a global batch, which one process computes at once.
    model = make_model([])
    loader = get_llama3_dataloader(DATA, 8, DATA, num_workers=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(itertools.chain(loader, loader)):
        if step in (STOP, LATER, END):
            keep_weights({"name": f"by hand {step}"}, model)
        if step == END:
            break
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

class OwnTrainer(LoaderMixin, Trainer):
    pass

def evaluate_on_ranks(run, seen):
    arguments = TrainingArguments(
        output_dir=f"{OUT}/e", use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
        per_device_train_batch_size=2,
    )
    options = {"model_id": DATA, "num_workers": 0}
    train_loader = get_llama3_dataloader(DATA, 2, **options)
    eval_loader = get_llama3_dataloader(DATA, run["batch_size"], split="validation", **options)
    model = make_model([])
    trainer = OwnTrainer(model=model, args=arguments, train_loader=train_loader, eval_loader=eval_loader)
    seen.append([trainer.evaluate()["eval_loss"], loader_package.evaluation_loss(model, eval_loader)])
    if run["code"]:
        names = {"model": model}
        exec(compile(run["code"], "docs/training_lightning.md", "exec"), names)
        lightning_trainer = names["lightning"].Trainer(
            accelerator="cpu", devices=run["world"], strategy="ddp" if run["world"] > 1 else "auto",
            logger=False, enable_progress_bar=False, default_root_dir=f"{OUT}/lightning",
            enable_model_summary=False, use_distributed_sampler=False,
        )
        (found,) = lightning_trainer.validate(names["ValidatedLlama"](), eval_loader, verbose=False)
        seen[0].append(found["eval_loss"])
    if run["world"] == 1:  # and by another way
        sums = [0.0, 0]
        for batch in get_llama3_dataloader(DATA, 1, split="validation", **options):
            logits = model(input_ids=batch["input_ids"]).logits[0, :-1].double().log_softmax(-1)
            targets = batch["input_ids"][0, 1:, None]
            sums = [sums[0] - logits.gather(1, targets).sum().item(), sums[1] + len(targets)]
        seen.append(sums[0] / sums[1])
    kept.append(trainer)
    if dist.is_initialized():
        dist.destroy_process_group()

def check_boundaries_in_trainer(run, seen):
    class MaskingTrainer(OwnTrainer):
        def compute_loss(self, model, inputs, **more):
            mask = sdpa_mask({"segment_ids": inputs.pop("segment_ids")})
            inputs |= {"attention_mask": mask} if self.masks else {}
            return super().compute_loss(model, inputs, **more)

    arguments = TrainingArguments(
        output_dir=f"{OUT}/b", use_cpu=True, report_to=[], max_steps=2, disable_tqdm=True,
        per_device_train_batch_size=4, save_strategy="no", ddp_backend="gloo",
    )
    families = ["llama", "opt", "opt", "opt", "llama", "llama", "llama"]
    llama, opt, switched_off, masked, plain, hidden, bare = (small_model(name, "sdpa") for name in families)
    mask_documents(masked)
    for kind, model, boundaries, masks, checks, expected in (
        (OwnTrainer, llama, "transformers", None, True, "safe"),
        (OwnTrainer, masked, "transformers", None, True, "safe"),
        (MaskingTrainer, hidden, "segment_ids", True, True, "safe"),
        (OwnTrainer, opt, "transformers", None, True, "refused"),
        (MaskingTrainer, bare, "segment_ids", False, True, "refused"),
        (OwnTrainer, plain, (), None, True, "unchecked"),
        (OwnTrainer, switched_off, "transformers", None, False, "unchecked"),
    ):
        calls, code = [], 0
        model.register_forward_pre_hook(lambda module, *_: calls.append(module.training))
        options = {"seq_len": 16, "boundaries": boundaries, "num_workers": 0, "pin_memory": False}
        loader = get_llama3_dataloader(DATA, 4, DATA, **options)
        trainer = kind(model=model, args=arguments, train_loader=loader, check_boundaries=checks)
        trainer.masks = masks
        try:
            trainer.train()
        except Refused as error:
            code = error.exit_code
        steps = [] if expected == "refused" else [True, True]  # behind passes in evaluation mode
        passes = set() if expected == "unchecked" else {False}
        assert code == (78 if expected == "refused" else 0), expected
        num_passes = len(calls) - len(steps)
        assert (set(calls[:num_passes]), calls[num_passes:]) == (passes, steps), calls
        kept.append(trainer)
    seen.append("right")
    if dist.is_initialized():
        dist.destroy_process_group()

def check_boundaries_of_wrapped_models(run, seen):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    packed = get_llama3_dataloader(DATA, 4, DATA, num_workers=0, seq_len=16, boundaries="transformers").peek()
    one = {**packed, "position_ids": torch.arange(16).expand(4, 16)}
    one |= {"cu_seq_lens_q": torch.arange(0, 65, 16, dtype=torch.int32)}
    mesh = init_device_mesh("cpu", (2,))
    for wrap in (DistributedDataParallel, lambda model: fully_shard(model, mesh=mesh)):
        for verdict in ("Refused", "safe"):
            model = small_model("opt", "sdpa")
            if verdict == "safe":
                mask_documents(model)
            model = wrap(model)
            # All ranks say the same, if one has something to check.
            of_one = packed if rank else one
            for batch, expected in ((packed, verdict), (of_one, verdict), (one, "UsageError")):
                found = "safe"
                try:
                    check_boundaries(model, batch)
                except (UsageError, Refused) as error:
                    found = type(error).__name__
                assert found == expected
            model(**packed).loss.backward()
    seen.append("right")
    kept.append(model)
    dist.destroy_process_group()

def rank_of_a_world(rank, run):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(run["world"]), "LOCAL_RANK": str(rank)}
    with open(f"{OUT}/{run['name']}-{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    seen = []
    globals()[run["how"]](run, seen)
    pathlib.Path(f"{OUT}/{run['name']}-{rank}.json").write_text(json.dumps(seen))

if __name__ == "__main__":
    for run in json.loads(sys.argv[3]):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        try:
            start_processes(rank_of_a_world, (run,), run["world"], start_method="fork")
        except Exception as error:  # a rank's
            pathlib.Path(f"{OUT}/{run['name']}.error").write_text(str(error))
"""


OTHERS = ["check_boundaries_in_trainer", "check_boundaries_of_wrapped_models"]


def run_of(name: str, how: str, world: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "how": how, "world": world, "workers": 0, **more}


class Runs:
    """What each rank of each run saw."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> list[Any]:
        """By rank. Fails, with all that its ranks printed, where a rank did not end well."""
        logs = sorted(self._folder.glob(f"{name}-?.log"))
        for error in self._folder.glob(f"{name}.error"):
            pytest.fail("\n--- next rank\n".join(path.read_text() for path in [error, *logs]))
        return [json.loads(path.with_suffix(".json").read_text()) for path in logs]

    def weights(self, name: str) -> list[list[float]]:
        """Of each parameter, in the end."""
        found: list[list[float]] = json.loads((self._folder / f"{name}.weights").read_text())
        return found


@pytest.fixture(scope="module")
def seen(numbered: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of all tests, since the libraries take seconds to import."""
    folder = tmp_path_factory.mktemp("runs")
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
    pages = [run for page, needs in NEEDS.items() if find_spec(needs) for run in page_runs(page)]
    pages.append(run_of("by hand", "train_by_hand", 1))
    runs = [*pages, *evaluations(), *(run_of(how, how, 2) for how in OTHERS)]
    words = [str(numbered), str(folder), json.dumps(runs), json.dumps([STOP, LATER, END])]
    command = [sys.executable, str(script), *words]
    run_child(command, cwd=folder)
    return Runs(folder)


def evaluations() -> list[dict[str, Any]]:
    """Of one model on other ranks, in batches of other sizes."""
    code = code_of("lightning", 1) if find_spec("lightning") else ""
    return [
        run_of(f"loss {world}x{size}", "evaluate_on_ranks", world, batch_size=size, code=code)
        for world, size in ((1, 8), (1, 1), (2, 3), (4, 16))
    ]


def page_runs(page: str) -> list[dict[str, Any]]:
    """With all batches of a step accumulated, and on ranks side by side."""
    runs = []
    for name, (world, batch_size, _, last) in PAGE_RUNS.items():
        how = {"page": page, "batch_size": batch_size, "last": last, "workers": int(world == 2)}
        how["checkpoint"] = f"{page} {name}" if name == "whole" else page
        runs.append(run_of(f"{page} {name}", "train_by_page", world, **how))
    return runs


def global_batches(ranks: list[list[Any]], accumulated: int) -> list[str]:
    """Every global batch as text: of each rank its micro-batches, a rank after the other."""
    found = []
    for first in range(0, len(ranks[0]), accumulated):
        samples = [ids for rank in ranks for batch in rank[first : first + accumulated] for ids in batch]
        assert len(samples) == GLOBAL_BATCH
        found.append(json.dumps(samples))
    return found


@pytest.mark.parametrize("page", NEEDS)
def test_a_page_resumed_on_other_ranks_and_batches_sees_and_learns_the_same(seen: Runs, page: str) -> None:
    """Documents have 0 to 4 labels, so weights by a mean of means would be off by far more."""
    pytest.importorskip(NEEDS[page])
    assert seen["by hand"] == [[]]
    whole: list[str] = []
    for run in page_runs(page):
        name, (*_, first, last) = run["name"], PAGE_RUNS[run["name"].rpartition(" ")[2]]
        found = global_batches(seen[name], GLOBAL_BATCH // (run["world"] * run["batch_size"]))
        whole = whole or found
        assert found == whole[first:last], name
        for weights, expected in zip(seen.weights(name), seen.weights(f"by hand {last}"), strict=True):
            equal = {"rtol": 1e-4, "atol": 1e-6, "msg": name}
            torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected), **equal)
    assert len(set(whole)) == len(whole) == END


def test_the_loss_is_the_mean_over_all_labels_on_every_number_of_ranks(seen: Runs) -> None:
    """107 samples, of which 4 x 16 ranks leave some batches without labels."""
    expected = seen["loss 1x8"][0][1]
    assert 4 < expected < 7
    for run in evaluations():
        assert len(seen[run["name"]]) == run["world"], f"{run['name']} failed"
        for of_rank in seen[run["name"]]:
            assert of_rank[0] == pytest.approx([expected] * (3 if run["code"] else 2), rel=1e-6), run["name"]


def test_a_trainer_checks_boundaries_once_by_what_the_model_gets_and_all_ranks_refuse(seen: Runs) -> None:
    assert seen["check_boundaries_in_trainer"] == [["right"], ["right"]]


def test_wrapped_models_are_checked_and_all_ranks_say_the_same(seen: Runs) -> None:
    assert seen["check_boundaries_of_wrapped_models"] == [["right"], ["right"]]


# torchtitan and TRL, in this process


def shard_loaders(data: Path, world: int, rows: int) -> list[Any]:
    """The dataloader of docs/training_others.md for each rank, as torchtitan's trainer builds it."""
    base = pytest.importorskip("torchtitan.components.dataloader").BaseDataLoader
    (code,) = (text for text in examples_of("training_others.md") if "BaseDataLoader" in text)
    names: dict[str, Any] = {"__name__": "training_others"}
    exec(compile(code, "docs/training_others.md", "exec", dont_inherit=True), names)
    config: Any = names["ShardLoader"].Config(dataset_path=str(data), global_batch_size=rows, num_workers=0)
    runtime = {"tokenizer": None, "seq_len": SEQ_LEN - 1, "snapshot_every_n_steps": None}
    built = [
        config.build(dp_world_size=world, dp_rank=rank, local_batch_size=rows // world, **runtime)
        for rank in range(world)
    ]
    assert all(isinstance(each, base) for each in built)
    return built


def test_torchtitans_checkpoints_resume_on_another_number_of_ranks(sets: DataSets, tmp_path: Path) -> None:
    def steps(loaders: list[Any], number: int) -> list[list[Any]]:
        """The next global batches: input, positions, labels."""
        iterators, found = [iter(each) for each in loaders], []
        for _ in range(number):
            parts = [next(iterator) for iterator in iterators]
            fields = [(inputs["input"], inputs["positions"], labels) for inputs, labels in parts]
            found.append([torch.cat(each).tolist() for each in zip(*fields, strict=True)])
        return found

    options: dict[str, Any] = {"seq_len": SEQ_LEN - 1, "targets": "shifted", "boundaries": "position_ids"}
    with open_loader(sets["concat"], 4, **options) as plain:
        names = ("input_ids", "position_ids", "labels")
        expected = [[batch[name].tolist() for name in names] for batch in islice(plain, 7)]
    first = shard_loaders(sets["concat"], 2, 4)
    assert steps(first, 3) == expected[:3]
    state_dict_saver.save({"dataloader": first[0]}, checkpoint_id=tmp_path / "step", no_dist=True)
    for world in (1, 2, 4):
        resumed = shard_loaders(sets["concat"], world, 4)
        for each in resumed:
            state_dict_loader.load({"dataloader": each}, checkpoint_id=tmp_path / "step", no_dist=True)
        assert steps(resumed, 4) == expected[3:]


def test_trls_trainer_trains_on_the_loaders_conversations(sets: DataSets, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    (example,) = (code for code in examples_of("training_trainer.md") if "SFTTrainer" in code)
    trained: list[Any] = []
    llama = small_model("llama", "sdpa")
    llama.resize_token_embeddings(400)
    llama.register_forward_pre_hook(lambda *args: trained.append(args[-1]), with_kwargs=True)
    more = {"use_cpu": True, "report_to": [], "bf16": False, "save_strategy": "no", "disable_tqdm": True}
    names: dict[str, Any] = {"DATA": str(sets["chat"]), "CHECKPOINT": str(tmp_path / "out"), "num_steps": 2}
    names |= {"model": llama, "more_arguments": more}
    exec(compile(example, "docs/training_trainer.md", "exec"), names)
    in_steps = [fields for fields in trained if fields.get("labels") is not None]
    assert len(in_steps) == 2
    assert all((fields["labels"] == -100).any() for fields in in_steps)
    assert all(fields["position_ids"].shape == (8, SEQ_LEN) for fields in in_steps)
