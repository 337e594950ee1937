"""Energon: a webdataset of raw uint32 rows, a cooker that turns them into tensors, get_loader."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import webdataset as wds
from measure import BATCH, NUM_SHARDS, run, with_labels
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)


@edataclass
class Row(Sample):
    """A row of ids."""

    ids: torch.Tensor


@stateless
def cook(sample):
    ids = np.frombuffer(sample["ids"], np.uint32).astype(np.int64)
    return Row(**basic_sample_keys(sample), ids=torch.from_numpy(ids))


class RowEncoder(DefaultTaskEncoder):
    """Turn crude samples into rows. Energon stacks the batches."""

    cookers = (Cooker(cook),)


def prepare(rows, out):
    for shard, part in enumerate(np.array_split(np.arange(len(rows)), NUM_SHARDS)):
        with wds.TarWriter(str(out / f"shard-{shard:05d}.tar")) as writer:
            for row in part:
                writer.write({"__key__": f"s{row:08d}", "ids": rows[row].tobytes()})
    options = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset"]
    tool = Path(sys.executable).parent / "energon"
    subprocess.run([tool, "prepare", *options, "--num-workers", "1", out], check=True, stdout=sys.stderr)


def batches(out):
    data = get_train_dataset(
        out,
        batch_size=BATCH,
        shuffle_buffer_size=1000,
        max_samples_per_sequence=100,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        task_encoder=RowEncoder(),
    )
    return (with_labels(batch.ids) for batch in get_loader(data))


if __name__ == "__main__":
    run(prepare, batches)
