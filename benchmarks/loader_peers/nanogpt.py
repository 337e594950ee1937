"""The idiom of nanoGPT's train.py: a memory map opened for each batch, random offsets, shifted targets."""

import numpy as np
import torch
from measure import BATCH, SEQ_LEN, run


def prepare(rows, out):
    rows.reshape(-1).astype(np.uint32).tofile(out / "train.bin")


def batches(out):
    while True:
        data = np.memmap(out / "train.bin", dtype=np.uint32, mode="r")
        starts = torch.randint(len(data) - SEQ_LEN, (BATCH,)).tolist()
        x = torch.stack([torch.from_numpy(data[i : i + SEQ_LEN].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + SEQ_LEN].astype(np.int64)) for i in starts])
        yield {"input_ids": x, "labels": y}


if __name__ == "__main__":
    run(prepare, batches)
