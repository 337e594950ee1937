"""Training frameworks in real process groups: the same global batches, unbroken or resumed on another world.

What accelerate looks for on a loader are internals of it; these tests hold them.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer

pytest.importorskip("accelerate")

NUM_SAMPLES, GLOBAL_BATCH = 107, 8
STEPS = NUM_SAMPLES // GLOBAL_BATCH  # an epoch
STOP, END = 7, STEPS + 9  # inside of the first epoch, and of the second

# The libraries are imported once, then the ranks of each world are forked with the variables of a launcher.
SCRIPT = """
import json, logging, multiprocessing, os, sys
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from loader import get_llama3_dataloader
from shardprep.errors import UsageError

torch.set_num_threads(1)
DATA, OUT = sys.argv[1:3]

def make_loader(run):
    batch_size = 8 // (run["world"] * run["accumulated"])
    options = {"global_batch_size": 8, "num_workers": run["workers"], "seed": 5}
    return get_llama3_dataloader(DATA, batch_size, DATA, **options)

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

def train_with_accelerate(run, seen):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=run["accumulated"])
    loader = make_loader(run)
    model = make_model(seen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, model, optimizer = accelerator.prepare(loader, model, optimizer)
    assert prepared is loader
    if run["after"]:
        accelerator.load_state(f"{OUT}/{run['after']}")
        accelerator.step = 0
    step = run["first"]
    while step < run["last"]:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if step == run["last"]:
                break
    accelerator.save_state(f"{OUT}/{run['name']}")
    loader.close()

def train_with_trainer(run, seen):
    loader = make_loader(run)

    class OwnLoader(Trainer):
        def get_train_dataloader(self):
            return loader

    class SaveLoader(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.is_world_process_zero:
                with open(f"{args.output_dir}/checkpoint-{state.global_step}/loader.json", "w") as file:
                    json.dump(loader.state_dict(), file)

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = control.should_save = state.global_step == run["last"]

    checkpoint = f"{OUT}/{run['after']}/checkpoint-{run['first']}" if run["after"] else None
    if checkpoint:
        with open(f"{checkpoint}/loader.json") as file:
            loader.load_state_dict(json.load(file))
    arguments = TrainingArguments(
        output_dir=f"{OUT}/{run['name']}", use_cpu=True, ddp_backend="gloo", num_train_epochs=2,
        gradient_accumulation_steps=run["accumulated"], per_device_train_batch_size=loader.batch_size,
        ignore_data_skip=True, save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no",
    )
    trainer = OwnLoader(model=make_model(seen), args=arguments, callbacks=[SaveLoader()])
    trainer.train(resume_from_checkpoint=checkpoint)
    loader.close()

def refuse_in_trainer(run, seen):
    loader = make_loader(run)
    said = []
    for data_set in (loader, loader.dataset):
        arguments = TrainingArguments(output_dir=f"{OUT}/x", use_cpu=True, report_to=[], max_steps=2)
        try:
            Trainer(model=make_model([]), args=arguments, train_dataset=data_set).train()
        except UsageError as error:
            said.append(str(error))
    seen.append(said)

def warn_of_accumulation(run, seen):
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
    for options in ({"device_mesh": mesh["dp"]}, {"process_group": mesh["dp"].get_group()}):
        with get_llama3_dataloader(DATA, 4, DATA, num_workers=0, seed=5, **options) as loader:
            who, first = loader.process_rank, next(iter(loader))["input_ids"][:, 0]
            seen.append([who.rank, who.world_size, who.source, first.tolist()])
    try:
        get_llama3_dataloader(DATA, 4, DATA, device_mesh=mesh)
    except UsageError as error:
        seen.append(str(error))
    dist.destroy_process_group()

def rank_of_a_world(run, rank):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(run["world"]), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(run["port"])}
    seen = []
    globals()[run["how"]](run, seen)
    with open(f"{OUT}/{run['name']}-{rank}.json", "w") as file:
        json.dump(seen, file)

def main():
    fork = multiprocessing.get_context("fork")
    for run in json.loads(sys.argv[3]):
        ranks = [fork.Process(target=rank_of_a_world, args=(run, rank)) for rank in range(run["world"])]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert [process.exitcode for process in ranks] == [0] * run["world"], run

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tars by webdataset, a sample's first id its number, with the tokenizer beside them."""
    folder = tmp_path_factory.mktemp("data")
    save_word_tokenizer(folder, 200)
    write_numbered_tars(
        folder,
        NUM_SAMPLES,
        3,
        name="shard-{:05d}.tar",
        ids_of=lambda number: [number, *range(number % 5)],
    )
    return folder


def run_of(name: str, how: str, world: int, **more: Any) -> dict[str, Any]:
    run = {"workers": 0, "accumulated": 1, "first": 0, "last": END, "after": "", **more}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return {"name": name, "how": how, "world": world, "port": port, **run}


def run_worlds(data: Path, folder: Path, runs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """What each rank of each run saw."""
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
    launchers = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "ACCELERATE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    environ = {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    environ |= {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), str(data), str(folder), json.dumps(runs)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-5000:]
    return {
        run["name"]: [
            json.loads((folder / f"{run['name']}-{rank}.json").read_text()) for rank in range(run["world"])
        ]
        for run in runs
    }


def digests(ranks: list[list[Any]], accumulated: int) -> list[str]:
    """sha256 of every global batch: of each rank its micro-batches, a rank after the other."""
    found = []
    for first in range(0, len(ranks[0]), accumulated):
        samples = [ids for rank in ranks for batch in rank[first : first + accumulated] for ids in batch]
        assert len(samples) == GLOBAL_BATCH
        found.append(hashlib.sha256(json.dumps(samples).encode()).hexdigest())
    return found


@pytest.mark.parametrize("how", ["train_with_accelerate", "train_with_trainer"])
def test_a_framework_stopped_and_resumed_on_another_world_sees_every_global_batch_as_if_it_had_not_been(
    data: Path, tmp_path: Path, how: str
) -> None:
    runs = [
        run_of("whole", how, 1),
        run_of("stopped", how, 2, workers=1, last=STOP),
        run_of("resumed", how, 1, accumulated=2, first=STOP, last=STEPS + 2, after="stopped"),
        run_of("again", how, 2, accumulated=2, first=STEPS + 2, after="resumed", workers=2),
    ]
    found = run_worlds(data, tmp_path, runs)
    whole = digests(found["whole"], 1)
    assert len(set(whole)) == len(whole) == END
    for run in runs:
        expected = whole[run["first"] : run["last"]]
        assert digests(found[run["name"]], run["accumulated"]) == expected, run["name"]


def test_a_trainer_that_is_given_the_loader_for_a_data_set_says_what_to_write(
    data: Path, tmp_path: Path
) -> None:
    found = run_worlds(data, tmp_path, [run_of("refused", "refuse_in_trainer", 1)])
    (said,) = found["refused"][0]
    assert len(said) == 2
    assert all("def get_train_dataloader(self): return loader" in text for text in said)


def test_an_accumulation_that_the_global_batch_does_not_know_of_is_warned_of(
    data: Path, tmp_path: Path
) -> None:
    (seen,) = run_worlds(data, tmp_path, [run_of("warned", "warn_of_accumulation", 1)])["warned"]
    assert [len(lines) for lines in seen] == [0, 1]
    assert "accelerate accumulates 4 batches, but a global batch is 1 of each rank" in seen[1][0]
    assert "accelerator.step = 0" in seen[1][0]


def test_tensor_parallel_ranks_of_a_mesh_get_the_batches_of_their_data_parallel_rank(
    data: Path, tmp_path: Path
) -> None:
    found = run_worlds(data, tmp_path, [run_of("mesh", "share_by_mesh", 4)])["mesh"]
    for (by_mesh, by_group, refusal), rank in zip(found, (0, 0, 1, 1), strict=True):
        assert by_mesh[:3] == [rank, 2, "device_mesh"]
        assert by_group[:3] == [rank, 2, "process_group"]
        assert by_mesh[3] == by_group[3]
        assert refusal.startswith("device_mesh has 2 dimensions")
    assert found[0][0] == found[1][0] != found[2][0] == found[3][0]
