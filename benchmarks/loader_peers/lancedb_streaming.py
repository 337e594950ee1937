"""lancedb's StreamingDataset and StreamingDataLoader: rows as lists of uint32, shuffled row by row."""

import lancedb
import numpy as np
import pyarrow as pa
import torch
from lancedb.streaming import StreamingDataLoader, StreamingDataset
from measure import BATCH, SEQ_LEN, run, with_labels


def prepare(rows, out):
    ids = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), SEQ_LEN)
    lancedb.connect(out).create_table("rows", pa.table({"ids": ids}))


def to_rows(batch):
    ids = batch["ids"].flatten().to_numpy().reshape(-1, SEQ_LEN)
    return torch.from_numpy(ids.astype(np.int64))


def batches(out):
    table = lancedb.connect(out).open_table("rows")
    epoch = 0
    while True:
        data = StreamingDataset(
            table,
            shuffle_seed=0,
            epoch=epoch,
            rank=0,
            world_size=1,
            transform=to_rows,
            transform_parallelism=1,
        )
        yield from map(with_labels, StreamingDataLoader(data, batch_size=BATCH))
        epoch += 1


if __name__ == "__main__":
    run(prepare, batches)
