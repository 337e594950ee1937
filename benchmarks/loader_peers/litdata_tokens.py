"""litdata: TokensLoader, shuffled, as in its README for language models."""

import sys
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
from measure import BATCH, NUM_SHARDS, SEQ_LEN, epochs, run, with_labels


def some_rows(part, path=None):
    for row in np.load(path, mmap_mode="r")[part[0] : part[1]]:
        yield torch.from_numpy(row.astype(np.int32))


def prepare(rows, out):
    edges = np.linspace(0, len(rows), NUM_SHARDS + 1, dtype=int).tolist()
    optimize(
        fn=partial(some_rows, path=sys.argv[2]),
        inputs=list(pairwise(edges)),
        output_dir=str(out / "data"),
        chunk_size=SEQ_LEN * (len(rows) // NUM_SHARDS),
        item_loader=TokensLoader(block_size=SEQ_LEN),
        num_workers=1,
    )


def batches(out):
    data = StreamingDataset(
        str(out / "data"), item_loader=TokensLoader(block_size=SEQ_LEN), shuffle=True, drop_last=True
    )
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=0)
    return (with_labels(ids.long()) for ids in epochs(loader))


if __name__ == "__main__":
    run(prepare, batches)
