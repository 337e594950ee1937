"""Train a small Llama with DDP on a data set of shardprep, across time limits.

    python examples/train_llama.py DATA CHECKPOINTS --num_steps 1000                  one process
    sbatch --nodes=2 slurm/train_ddp.sh examples/train_llama.py DATA CHECKPOINTS ...  two nodes

The loop shows what a resumable run needs:

* save the loader's state together with the optimizer's step;
* publish a checkpoint by rename, and start all ranks from the same one;
* stop all ranks at the same step;
* fix the global batch size, not that of a rank: the run can go on with another number of ranks.

Every --log_every steps it prints the loss, tokens per second of all ranks, the share of the time that they
waited for the loader, and the position in the data. CHECKPOINTS/log.jsonl has the loss of every step.

Exit codes: 0 trained; 75 stopped after a checkpoint, run it again. Change the model in ``make_model``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from loader import find_process_rank, get_llama3_dataloader, set_up_training
from loader.training import TrainingSetup

STOPPED = 75
_stop_asked = False


def main() -> int:
    args = parse_args()
    for number in (signal.SIGUSR1, signal.SIGTERM):  # a preemption sends TERM
        signal.signal(number, ask_to_stop)
    who = find_process_rank()  # from the variables of torchrun or srun
    torch.manual_seed(args.seed)
    device = choose_device()
    if who.world_size > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=who.rank, world_size=who.world_size)
    loader = get_llama3_dataloader(
        args.data,
        batch_size=args.batch_size,
        global_batch_size=args.global_batch_size,
        seed=args.seed,
        seq_len=args.seq_len,
        boundaries="transformers",
        num_workers=args.num_workers,
        rank=who.rank,
        world_size=who.world_size,
    )
    setup = set_up_training(loader, bf16=args.bf16, num_threads=args.num_threads)
    model = make_model(loader.tokenizer, args, setup.model_options)
    model.to(device)  # type: ignore[arg-type]  # the wrapper of transformers has wrong types
    run = Run(args, loader, model, device, setup)
    run.load_newest(who.rank)
    if who.rank == 0:
        print(f"rank 0 of {who.world_size} ({who.source}), from step {run.step}", flush=True)
    with loader:
        is_trained = train(run, args)
    code = 0 if is_trained else STOPPED
    if dist.is_initialized():
        dist.destroy_process_group()
        end_at_once(code)
    return code


def end_at_once(code: int) -> NoReturn:
    """End the process without the interpreter's shutdown, where DDP and gloo may deadlock.

    During the shutdown DDP destroys gloo's group while it holds the GIL, which a thread of gloo may need to
    release its last work: pytorch/pytorch#56297, seen with torch 2.13.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train(run: Run, args: argparse.Namespace) -> bool:
    """Train to the last step. Return False if the run was asked to stop before."""
    rank, world_size = run.loader.process_rank.rank, run.loader.process_rank.world_size
    num_micro = args.global_batch_size // (args.batch_size * world_size)
    batches = endless(run.loader)
    health = Health(run, world_size)
    while run.step < args.num_steps:
        micro_batches = [next(batches) for _ in range(num_micro)]
        loss = run.optimizer_step(micro_batches, world_size)
        log_step(args, run.step, loss, micro_batches, rank)
        if run.step % args.log_every == 0:
            line = health.line(loss)
            if rank == 0:
                print(line, flush=True)
        time.sleep(args.step_sleep_s)
        stop = total(float(stop_wanted(rank)), run.device) > 0  # all ranks leave the loop at the same step
        if stop or run.step == args.num_steps or run.step % args.save_every == 0:
            if rank == 0:
                run.save()
            if dist.is_initialized():
                dist.barrier()
        if stop:
            return bool(run.step == args.num_steps)
    return True


class Run:
    """The state that a checkpoint stores: the model, the optimizer, the step, and the loader's position."""

    def __init__(
        self,
        args: argparse.Namespace,
        loader: Any,
        model: LlamaForCausalLM,
        device: torch.device,
        setup: TrainingSetup,
    ) -> None:
        self.folder: Path = args.checkpoint_dir
        self.loader, self.model, self.device, self.setup = loader, model, device, setup
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        self.trained = DistributedDataParallel(model) if dist.is_initialized() else model
        self.step = 0

    def optimizer_step(self, micro_batches: list[dict[str, torch.Tensor]], world_size: int) -> float:
        """Train one step on a global batch, and return its mean loss per token.

        Count the tokens of all ranks first, so that the gradient does not depend on the number of ranks.
        """
        num_targets = sum((batch["labels"][:, 1:] != -100).sum() for batch in micro_batches)
        num_tokens, loss_sum = total(float(num_targets), self.device), 0.0
        for batch in micro_batches:
            batch = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
            targets = batch.pop("labels")[:, 1:].flatten()
            with self.setup.autocast():
                logits = self.trained(**batch).logits  # position_ids etc. separate documents
            loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum")
            (loss * world_size / num_tokens).backward()  # DDP averages over the ranks
            loss_sum += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total(loss_sum, self.device) / num_tokens

    def save(self) -> None:
        """Save a checkpoint, which appears whole or not at all, and delete all but the two newest."""
        path = self.path_of(self.step)
        # A process of an earlier run, on a node that Slurm lost, may still write its own file.
        temporary = path.with_suffix(f".{os.uname().nodename}-{os.getpid()}.tmp")
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_at(self.step),  # of the trained step, not of what was read ahead
        }
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        for old in sorted(self.folder.glob("step-*.pt"))[:-2]:
            old.unlink()

    def load_newest(self, rank: int) -> None:
        """Load the newest checkpoint that rank 0 can read, if there is one.

        Rank 0 chooses for all ranks. Otherwise they would start from different steps if only some of them can
        read a file.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        state = self.newest_state() if rank == 0 else None
        step = [state["step"] if state else None]
        if dist.is_initialized():
            dist.broadcast_object_list(step)
        if step[0] is None:
            return
        if state is None:
            state = self.read(self.path_of(step[0]))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        self.step = step[0]

    def newest_state(self) -> dict[str, Any] | None:
        """Return the newest checkpoint that can be read: a disk failure may have damaged the last one."""
        found = sorted(self.folder.glob("step-*.pt"), reverse=True)
        for path in found:
            try:
                return self.read(path)
            except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
                print(f"warning: {path} cannot be read ({error}): trying an older one", flush=True)
        if found:
            raise SystemExit(f"error: no checkpoint in {self.folder} can be read; move them away")
        return None

    def read(self, path: Path) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        return state

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"


class Health:
    """Loss, speed and position of the run since the last line."""

    def __init__(self, run: Run, world_size: int) -> None:
        self.run, self.world_size = run, world_size
        self.began_s = time.perf_counter()

    def line(self, loss: float) -> str:
        """Return a line to print. All ranks must call this, because it sums over them."""
        now_s, metrics = time.perf_counter(), self.run.loader.metrics
        took_s, self.began_s = now_s - self.began_s, now_s
        num_tokens = total(float(metrics.num_tokens), self.run.device)
        wait_share = total(metrics.wait_s, self.run.device) / (took_s * self.world_size)
        metrics.reset()
        step, loader = self.run.step, self.run.loader
        at = loader.state_at(step)
        return (
            f"step {step}: loss {loss:.4f}, {num_tokens / took_s:,.0f} tokens/s, waited {wait_share:.1%} for "
            f"data, at step {at['step']} of {loader.run.steps_in(at['epoch'])} of epoch {at['epoch']}"
        )


def make_model(tokenizer: Any, args: argparse.Namespace, options: Mapping[str, Any]) -> LlamaForCausalLM:
    """Return a Llama with the tokenizer's vocabulary and random weights."""
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 3,
        num_hidden_layers=args.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    return LlamaForCausalLM(config)


def endless(loader: Any) -> Any:
    """Yield the batches of this epoch, the next one, and so on."""
    while True:
        yield from loader


def ask_to_stop(*_: object) -> None:
    global _stop_asked
    _stop_asked = True


def stop_wanted(rank: int) -> bool:
    """Return whether a signal or the file of train_ddp.sh asks to stop. The file also works in containers.

    Only a file of this user counts: others may write to CHECKPOINTS, too.
    """
    if _stop_asked or rank != 0:
        return _stop_asked
    try:
        status = os.lstat(os.environ.get("SHARDPREP_STOP_FILE", ""))
    except OSError:  # there is none
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def total(value: float, device: torch.device) -> float:
    """Return the sum over all ranks."""
    if not dist.is_initialized():
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return float(tensor.item())


def choose_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda")


def log_step(
    args: argparse.Namespace, step: int, loss: float, micro_batches: list[dict[str, torch.Tensor]], rank: int
) -> None:
    """Log a step: its loss and, with --log_batches, a hash of the samples of the global batch in order."""
    digest = None
    if args.log_batches:
        rows = [row.tolist() for batch in micro_batches for row in batch["input_ids"]]
        parts: list[Any] = [rows]
        if dist.is_initialized():
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, rows)
        digest = hashlib.sha256(json.dumps([row for part in parts for row in part]).encode()).hexdigest()
    if rank == 0:
        line = json.dumps({"step": step, "loss": loss, "batch": digest})
        with (args.checkpoint_dir / "log.jsonl").open("a") as file:
            file.write(line + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", help="folder of a verified data set")
    parser.add_argument("checkpoint_dir", type=Path)
    parser.add_argument("--num_steps", type=int, default=100)
    parser.add_argument("--global_batch_size", type=int, default=8, help="samples per step; never change it")
    parser.add_argument("--batch_size", type=int, default=2, help="samples per rank and backward pass")
    parser.add_argument("--seq_len", type=int, default=1024, help="tokens per packed row (default: 1024)")
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save_every", type=int, default=50)
    parser.add_argument("--log_every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--num_threads", type=int, default=None, help="threads per rank (default: its CPUs)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; weights stay float32")
    parser.add_argument("--step_sleep_s", type=float, default=0.0, help="slow down, to watch it")
    parser.add_argument("--log_batches", action="store_true", help="log a hash of every global batch")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
