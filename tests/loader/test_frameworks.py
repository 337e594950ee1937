"""Training frameworks in real process groups: the same global batches, unbroken or resumed on another world.

What accelerate looks for on a loader are internals of it; these tests hold them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.children import run_child
from tests.documented import examples_of
from tests.external_tars import write_numbered_data

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.processes, pytest.mark.frameworks]

PAGES = {  # docs/training_NAME.md -> what it needs, and whether batches are of 4 and accumulated
    "own_loop": ("torch", True),
    "trainer": ("transformers", True),
    "accelerate": ("accelerate", True),
    "lightning": ("lightning", False),
    "fsdp2": ("torch.distributed.fsdp", False),
    "deepspeed": ("deepspeed", False),
}

NUM_SAMPLES, GLOBAL_BATCH = 107, 8
STEPS = NUM_SAMPLES // GLOBAL_BATCH  # an epoch
STOP, END = 7, STEPS + 9  # inside of the first epoch, and of the second

# All is of the wheel. The libraries are imported once, then the ranks of each world are forked with the
# variables of a launcher.
SCRIPT = """
import functools, json, logging, multiprocessing, os, pathlib, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
import loader as loader_package
from loader import check_boundaries, get_llama3_dataloader, mask_documents
from loader.boundaries import sdpa_mask
from loader.trainer import LoaderMixin
from shardprep.errors import Refused, UsageError

torch.set_num_threads(1)
assert loader_package.__file__.startswith(os.environ["PYTHONPATH"]), "of the wheel, not of the checkout"
DATA, OUT = sys.argv[1:3]
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
    # What a page says, with all that it leaves to its reader.
    torch.set_num_threads(1)
    loader_package.get_llama3_dataloader = functools.wraps(get_llama3_dataloader)(
        lambda *args, **options: get_llama3_dataloader(
            *args, model_id=DATA, **{**options, "num_workers": run["workers"]}
        )
    )
    if run["page"] in ("own_loop", "fsdp2", "deepspeed"):
        dist.init_process_group("gloo")
    model = make_model(seen)
    if run["page"] == "own_loop":  # whose steps go side by side: no rank may find the other's checkpoint
        model = torch.nn.parallel.DistributedDataParallel(model)
    more = {
        "accelerate": {"cpu": True},
        "trainer": {
            "use_cpu": True, "ddp_backend": "gloo", "report_to": [], "disable_tqdm": True,
            "logging_strategy": "no", "save_strategy": "steps", "save_steps": run["last"],
            "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0,
        },
        "lightning": {
            "accelerator": "cpu", "devices": run["world"], "logger": False, "enable_progress_bar": False,
            "default_root_dir": f"{OUT}/lightning", "enable_model_summary": False,
            "strategy": "ddp" if run["world"] > 1 else "auto",
            "accumulate_grad_batches": run.get("accumulated", 1),
        },
    }
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    # DeepSpeed's default clips gradients, which the hand does not
    config |= {"gradient_accumulation_steps": run.get("accumulated", 1), "gradient_clipping": 0}
    names = {
        "DATA": DATA, "CHECKPOINT": f"{OUT}/{run['checkpoint']}", "num_steps": run["last"], "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "device": "cpu", "num_ranks": run["world"], "rank": int(os.environ["RANK"]),
        "more_arguments": more.get(run["page"]),
        "config": config,
    }
    exec(compile(run["code"], run["page"], "exec"), names)
    keep_weights(run, model)
    if run["page"] == "trainer":
        epoch = names["trainer"].state.epoch
        assert abs(epoch - run["last"] / run["steps"]) < 1e-9, f"epoch is {epoch} after step {run['last']}"
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
    for _, batch in zip(range(run["last"]), loader):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        losses = [
            -logits[row, at].log_softmax(0)[label]
            for row, labels in enumerate(batch["labels"])
            for at, label in enumerate(labels[1:])
            if label != -100
        ]
        gradients = torch.autograd.grad(sum(losses) / len(losses), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter -= 0.1 * gradient
    keep_weights(run, model)

def evaluate_in_trainer(run, seen):
    class OwnTrainer(LoaderMixin, Trainer):
        pass

    train_loader = get_llama3_dataloader(DATA, 8, DATA, num_workers=0)
    eval_loader = get_llama3_dataloader(DATA, 8, DATA, num_workers=0, split="validation")
    arguments = TrainingArguments(
        output_dir=f"{OUT}/e", use_cpu=True, report_to=[], max_steps=4, disable_tqdm=True,
        eval_strategy="steps", per_device_train_batch_size=8, eval_steps=2, save_strategy="no",
    )
    model = make_model([])
    model.register_forward_pre_hook(
        lambda module, args, fields: None if module.training else seen.append(fields["input_ids"].tolist()),
        with_kwargs=True,
    )
    trainer = OwnTrainer(model=model, args=arguments, train_loader=train_loader, eval_loader=eval_loader)
    trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    seen[:] = [list(seen), len(eval_loader), losses]

def evaluate_on_ranks(run, seen):
    class OwnTrainer(LoaderMixin, Trainer):
        pass

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

def refuse_numbers_in_trainer(run, seen):
    class OwnTrainer(LoaderMixin, Trainer):
        pass

    loader = get_llama3_dataloader(DATA, 2, DATA, num_workers=0)
    for batch_size, accumulated, train_loader in ((4, 1, loader), (2, 4, loader), (2, 1, [])):
        arguments = TrainingArguments(
            output_dir=f"{OUT}/x", use_cpu=True, report_to=[], max_steps=2, disable_tqdm=True,
            per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulated,
        )
        try:
            OwnTrainer(model=make_model([]), args=arguments, train_loader=train_loader)
        except UsageError as error:
            seen.append(str(error))

def resume_in_trainer_without_a_state(run, seen):
    class OwnTrainer(LoaderMixin, Trainer):
        pass

    def trainer(max_steps):
        loader = get_llama3_dataloader(DATA, 8, DATA, num_workers=0)
        arguments = TrainingArguments(
            output_dir=f"{OUT}/t", use_cpu=True, report_to=[], max_steps=max_steps, disable_tqdm=True,
            per_device_train_batch_size=8, save_strategy="steps", save_steps=2,
        )
        return OwnTrainer(model=make_model(seen), args=arguments, train_loader=loader)

    trainer(2).train()
    path = pathlib.Path(f"{OUT}/t/checkpoint-2/trainer_state.json")
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["LoaderStateCallback"]
    path.write_text(json.dumps(state))
    try:
        trainer(4).train(resume_from_checkpoint=True)
    except UsageError as error:
        seen[:] = [str(error)]

def refuse_in_trainer(run, seen):
    loader = get_llama3_dataloader(DATA, 8, DATA, num_workers=0)
    said = []
    for data_set in (loader, loader.dataset):
        arguments = TrainingArguments(output_dir=f"{OUT}/x", use_cpu=True, report_to=[], max_steps=2)
        try:
            Trainer(model=make_model([]), args=arguments, train_dataset=data_set).train()
        except UsageError as error:
            said.append(str(error))
    seen.append(said)

def check_boundaries_in_trainer(run, seen):
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": 200, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    llama = LlamaConfig(**sizes, intermediate_size=32, initializer_range=0.2)
    opt = OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=32, init_std=0.2)

    class OwnTrainer(LoaderMixin, Trainer):
        pass

    class MaskingTrainer(OwnTrainer):
        def compute_loss(self, model, inputs, **more):
            segments = inputs.pop("segment_ids")
            seen.append(sorted(inputs))
            if self.masks:
                inputs = {**inputs, "attention_mask": sdpa_mask({"segment_ids": segments})}
            return super().compute_loss(model, inputs, **more)

    def train(kind, model, boundaries, masks=False, **more):
        calls = []
        model.register_forward_pre_hook(lambda module, *_: calls.append(module.training))
        arguments = TrainingArguments(
            output_dir=f"{OUT}/b", use_cpu=True, report_to=[], max_steps=2, disable_tqdm=True,
            per_device_train_batch_size=4, save_strategy="no", ddp_backend="gloo",
        )
        loader = get_llama3_dataloader(
            DATA, 4, DATA, num_workers=0, seq_len=16, boundaries=boundaries, pin_memory=False
        )
        trainer = kind(model=model, args=arguments, train_loader=loader, **more)
        trainer.masks = masks
        try:
            trainer.train()
        except Refused as error:
            return [calls, str(error), error.exit_code]
        return [calls, "", 0]

    masked = OPTForCausalLM(opt)
    mask_documents(masked)
    runs = {
        "llama": (OwnTrainer, LlamaForCausalLM(llama), "transformers"),
        "opt": (OwnTrainer, OPTForCausalLM(opt), "transformers"),
        "opt, masked": (OwnTrainer, masked, "transformers"),
        "no boundaries": (OwnTrainer, LlamaForCausalLM(llama), ()),
        "no mask": (MaskingTrainer, LlamaForCausalLM(llama), "segment_ids"),
        "a mask": (MaskingTrainer, LlamaForCausalLM(llama), "segment_ids", True),
    }
    found = {name: train(*each) for name, each in runs.items()}
    found["opt, switched off"] = train(
        OwnTrainer, OPTForCausalLM(opt), "transformers", check_boundaries=False
    )
    seen[:] = [found]
    if dist.is_initialized():
        dist.destroy_process_group()

def check_boundaries_of_wrapped_models(run, seen):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from transformers import OPTConfig, OPTForCausalLM

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    packed = get_llama3_dataloader(DATA, 4, DATA, num_workers=0, seq_len=16, boundaries="transformers").peek()
    one = {**packed, "position_ids": torch.arange(16).expand(4, 16)}
    one |= {"cu_seq_lens_q": torch.arange(0, 65, 16, dtype=torch.int32)}
    sizes = {"vocab_size": 200, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=32, init_std=0.2)
    mesh = init_device_mesh("cpu", (2,))
    for wrap in (DistributedDataParallel, lambda model: fully_shard(model, mesh=mesh)):
        for masks in (False, True):
            model = OPTForCausalLM(config)
            if masks:
                mask_documents(model)
            model = wrap(model)
            for batch in (packed, packed if rank else one, one):
                try:
                    check_boundaries(model, batch)
                    seen.append("safe")
                except (UsageError, Refused) as error:
                    seen.append(str(error))
            model(**packed).loss.backward()
    kept.append(model)
    dist.destroy_process_group()

def warn_of_accumulation(run, seen):
    from accelerate import Accelerator

    logging.basicConfig(filename=f"{OUT}/warnings")
    Accelerator(cpu=True, gradient_accumulation_steps=4)
    for global_batch_size in (8, None):
        loader = get_llama3_dataloader(DATA, 2, DATA, num_workers=0, global_batch_size=global_batch_size)
        next(iter(loader))
        with open(f"{OUT}/warnings") as file:
            seen.append([line for line in file if "accelerate accumulates" in line])

def share_by_mesh(run, seen):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    who = {"rank": mesh["dp"].get_local_rank(), "world_size": mesh["dp"].size()}
    with get_llama3_dataloader(DATA, 4, DATA, num_workers=0, seed=5, **who) as loader:
        seen.append([*who.values(), next(iter(loader))["input_ids"][:, 0].tolist()])
    dist.destroy_process_group()

def rank_of_a_world(run, rank, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(run["world"]), "LOCAL_RANK": str(rank)}
    os.environ["MASTER_PORT"] = str(port.recv())
    seen = []
    with open(f"{OUT}/{run['name']}-{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    globals()[run["how"]](run, seen)
    with open(f"{OUT}/{run['name']}-{rank}.json", "w") as file:
        json.dump(seen, file)

def main():
    fork = multiprocessing.get_context("fork")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for run in json.loads(sys.argv[3]):
        # As with torchrun the store is there before the ranks use it, so nobody can take its port. Its thread
        # begins after the fork, which would give the ranks whatever locks that thread holds.
        ports = [fork.Pipe(duplex=False) for _ in range(run["world"])]
        ranks = [
            fork.Process(target=rank_of_a_world, args=(run, rank, port))
            for rank, (port, _) in enumerate(ports)
        ]
        for process in ranks:
            process.start()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _, sender in ports:
            sender.send(store.port)
        for process in ranks:
            process.join()
        del store
        with open(f"{OUT}/{run['name']}.codes", "w") as file:
            json.dump([process.exitcode for process in ranks], file)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tars by webdataset, a sample's first id its number, with the tokenizer beside them."""
    return write_numbered_data(tmp_path_factory.mktemp("data"), NUM_SAMPLES, 3)


OTHERS = [
    "refuse_in_trainer",
    "evaluate_in_trainer",
    "refuse_numbers_in_trainer",
    "resume_in_trainer_without_a_state",
    "warn_of_accumulation",
    "share_by_mesh",
    "check_boundaries_in_trainer",
    "check_boundaries_of_wrapped_models",
]
WORLDS = {"share_by_mesh": 4, "check_boundaries_in_trainer": 2, "check_boundaries_of_wrapped_models": 2}


def run_of(name: str, how: str, world: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "how": how, "world": world, "workers": 0, "first": 0, "last": END, **more}


class Runs:
    """What each rank of each run saw."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> list[Any]:
        """By rank. Fails, with all that its ranks printed, where a rank did not end well."""
        codes = json.loads((self._folder / f"{name}.codes").read_text())
        logs = [(self._folder / f"{name}-{rank}.log").read_text() for rank in range(len(codes))]
        assert not any(codes), f"{name} ended with {codes}\n" + "\n--- next rank\n".join(logs)
        return [json.loads((self._folder / f"{name}-{rank}.json").read_text()) for rank in range(len(codes))]

    def weights(self, name: str) -> list[list[float]]:
        """Of each parameter, in the end."""
        found: list[list[float]] = json.loads((self._folder / f"{name}.weights").read_text())
        return found


@pytest.fixture(scope="module")
def seen(data: Path, site: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of all tests, since the libraries take seconds to import."""
    folder = tmp_path_factory.mktemp("runs")
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
    launchers = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "ACCELERATE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    environ = {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    environ |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(site)}
    pages = [run for page, (needs, _) in PAGES.items() if find_spec(needs) for run in page_runs(page)]
    pages += [run for page, (needs, _) in PAGES.items() if find_spec(needs) for run in layout_runs(page)]
    pages.append(run_of("by hand", "train_by_hand", 1, last=LAYOUT_STEPS))
    runs = [*pages, *evaluations(), *(run_of(how, how, WORLDS.get(how, 1)) for how in OTHERS)]
    command = [sys.executable, str(script), str(data), str(folder), json.dumps(runs)]
    run_child(command, env=environ, cwd=folder)
    return Runs(folder)


def evaluations() -> list[dict[str, Any]]:
    """Of one model on other ranks, in batches of other sizes."""
    code = code_of("lightning", 1) if find_spec("lightning") else ""
    return [
        run_of(f"loss {world}x{size}", "evaluate_on_ranks", world, batch_size=size, code=code)
        for world, size in ((1, 8), (1, 1), (2, 3), (4, 16))
    ]


def page_runs(page: str) -> list[dict[str, Any]]:
    shared: dict[str, Any] = {
        "how": "train_by_page",
        "page": page,
        "code": code_of(page, 0),
        "steps": STEPS,
        "checkpoint": f"{page} kept",
    }
    return [
        run_of(f"{page} whole", world=1, **{**shared, "checkpoint": f"{page} whole"}),
        run_of(f"{page} stopped", world=2, workers=1, last=STOP, **shared),
        run_of(f"{page} resumed", world=1, first=STOP, last=STEPS + 2, **shared),
        run_of(f"{page} again", world=2, first=STEPS + 2, workers=1, **shared),
    ]


LAYOUT_STEPS = 3
LAYOUTS = [(1, 8), (1, 1), (2, 2)]  # ranks, samples of a batch; 1, 8 and 2 batches are accumulated


def layout_runs(page: str) -> list[dict[str, Any]]:
    runs = []
    for world, batch_size in LAYOUTS:
        code = code_of(page, 0)
        for written in (
            "batch_size=4",
            "batch_size=8 // num_ranks",
            "batch_size=8 // self.trainer.world_size",
        ):
            code = code.replace(written, f"batch_size={batch_size}")
        assert f"batch_size={batch_size}" in code
        name = f"{page} of {world} x {batch_size}"
        accumulated = GLOBAL_BATCH // (world * batch_size)
        shared = {"page": page, "code": code, "steps": STEPS, "checkpoint": name, "last": LAYOUT_STEPS}
        runs.append(run_of(name, "train_by_page", world, accumulated=accumulated, **shared))
    return runs


def digests(ranks: list[list[Any]], accumulated: int) -> list[str]:
    """sha256 of every global batch: of each rank its micro-batches, a rank after the other."""
    found = []
    for first in range(0, len(ranks[0]), accumulated):
        samples = [ids for rank in ranks for batch in rank[first : first + accumulated] for ids in batch]
        assert len(samples) == GLOBAL_BATCH
        found.append(hashlib.sha256(json.dumps(samples).encode()).hexdigest())
    return found


def code_of(page: str, number: int) -> str:
    """One of the examples of docs/training_NAME.md, from 0; with a document a row, of which gradients by hand
    are easily written down."""
    code = examples_of(f"training_{page}.md")[number]
    return re.sub(r'\s*seq_len=2048,\s*boundaries="transformers",?', "", code)


@pytest.mark.parametrize("page", PAGES)
def test_a_frameworks_page_stopped_and_resumed_on_another_world_sees_every_global_batch_as_if_it_had_not_been(
    seen: Runs, page: str
) -> None:
    needs, accumulates = PAGES[page]
    pytest.importorskip(needs)
    runs = page_runs(page)
    accumulated = [GLOBAL_BATCH // (4 * run["world"]) if accumulates else 1 for run in runs]
    whole = digests(seen[f"{page} whole"], accumulated[0])
    assert len(set(whole)) == len(whole) == END
    for run, count in zip(runs, accumulated, strict=True):
        assert digests(seen[run["name"]], count) == whole[run["first"] : run["last"]], run["name"]


@pytest.mark.parametrize("page", PAGES)
def test_a_frameworks_page_trains_the_same_weights_on_every_layout(seen: Runs, page: str) -> None:
    """Documents have 0 to 4 labels, so a mean of means would be off by far more."""
    needs, _ = PAGES[page]
    pytest.importorskip(needs)
    assert seen["by hand"] == [[]]
    expected = [torch.tensor(each) for each in seen.weights("by hand")]
    for run in layout_runs(page):
        assert len(seen[run["name"]]) == run["world"]
        for found, weight in zip(seen.weights(run["name"]), expected, strict=True):
            torch.testing.assert_close(torch.tensor(found), weight, msg=run["name"], rtol=1e-4, atol=1e-6)


def test_a_trainer_that_is_given_the_loader_for_a_data_set_says_what_to_write(
    seen: Runs,
) -> None:
    ((said,),) = seen["refuse_in_trainer"]
    assert len(said) == 2
    assert all("class LlamaTrainer(LoaderMixin, Trainer)" in text for text in said)


def test_a_trainer_whose_steps_would_be_no_global_batches_is_refused(seen: Runs) -> None:
    (said,) = seen["refuse_numbers_in_trainer"]
    assert len(said) == 3
    assert "makes batches of 4 samples, those of the loader have 2" in said[0]
    assert "2 samples x 4 accumulated x 1 ranks = 8, the loader's global batch is 2" in said[1]
    assert "pass global_batch_size=8 to get_llama3_dataloader" in said[1]
    assert "train_loader is a list" in said[2]


def test_a_trainer_evaluates_the_same_validation_batches_each_time(seen: Runs) -> None:
    ((batches, num_batches, losses),) = seen["evaluate_in_trainer"]
    assert len(batches) == 2 * num_batches > 2
    assert batches[:num_batches] == batches[num_batches:]
    assert len(losses) == 2
    assert all(0 < loss < 10 for loss in losses)


def test_the_loss_of_a_model_is_the_mean_over_all_labels_on_every_number_of_ranks(
    seen: dict[str, list[Any]],
) -> None:
    """107 samples, of which 4 x 16 ranks leave some batches without labels."""
    expected = seen["loss 1x8"][0][1]
    assert 4 < expected < 7
    for run in evaluations():
        assert len(seen[run["name"]]) == run["world"], f"{run['name']} failed"
        for of_rank in seen[run["name"]]:
            assert of_rank[0] == pytest.approx([expected] * (3 if run["code"] else 2), rel=1e-6), run["name"]


def test_a_trainer_does_not_resume_from_a_checkpoint_without_the_loaders_state(
    seen: Runs,
) -> None:
    ((said,),) = seen["resume_in_trainer_without_a_state"]
    assert "the checkpoint of step 2 has no state of the loader" in said


def test_an_accumulation_that_the_global_batch_does_not_know_of_is_warned_of(
    seen: Runs,
) -> None:
    (lines,) = seen["warn_of_accumulation"]
    assert [len(each) for each in lines] == [0, 1]
    assert "accelerate accumulates 4 batches, but a global batch is 1 of each rank" in lines[1][0]
    assert "accelerator.step = 0" in lines[1][0]


def test_tensor_parallel_ranks_of_a_mesh_get_the_batches_of_their_data_parallel_rank(
    seen: Runs,
) -> None:
    found = seen["share_by_mesh"]
    assert [each[:2] for (each,) in found] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert found[0] == found[1] != found[2] == found[3]


def test_a_trainer_checks_the_boundaries_once_by_what_the_model_gets_and_refuses_on_all_ranks(
    seen: dict[str, list[Any]],
) -> None:
    assert len(seen["check_boundaries_in_trainer"]) == 2
    for (found,) in seen["check_boundaries_in_trainer"]:
        for run in ("llama", "opt, masked", "a mask"):
            calls, said, exit_code = found[run]
            # Some passes in evaluation mode, then the two steps.
            assert (set(calls[:-2]), calls[-2:], said, exit_code) == ({False}, [True, True], "", 0), run
        assert found["opt, switched off"] == found["no boundaries"] == [[True, True], "", 0]
        for run, name in (("opt", "OPTForCausalLM"), ("no mask", "LlamaForCausalLM")):
            calls, said, exit_code = found[run]
            assert (set(calls), exit_code) == ({False}, 78)
            assert f"documents of a packed row see each other in {name} (attention sdpa)" in said


def test_wrapped_models_are_checked_and_all_ranks_say_the_same_if_one_rank_has_something_to_check(
    seen: dict[str, list[Any]],
) -> None:
    first, second = seen["check_boundaries_of_wrapped_models"]
    assert len(first) == len(second) == 12
    for number, (said, said_by_other) in enumerate(zip(first, second, strict=True)):
        is_masked, is_alone = number % 6 >= 3, number % 3 == 2
        expected = (
            "no row of the batch has two"
            if is_alone
            else "safe"
            if is_masked
            else "OPTForCausalLM (attention sdpa)"
        )
        assert expected in said
        assert expected in said_by_other
