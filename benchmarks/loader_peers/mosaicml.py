"""MosaicML streaming: an ndarray column, as in llm-foundry; local, shuffled."""

import sys
import types

import numpy as np
import torch
import transformers  # noqa: F401  before the stubs: it asks whether torchvision is installed

# streaming imports torchvision for its vision data sets, and this may have no CPU build.
CLASSES = {
    "torchvision": (),
    "torchvision.datasets": ("VisionDataset",),
    "torchvision.transforms": (),
    "torchvision.transforms.functional": ("to_tensor",),
}
for name, classes in CLASSES.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update({item: type(item, (), {}) for item in classes})

from measure import BATCH, epochs, run, with_labels  # noqa: E402
from streaming import MDSWriter, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402


def prepare(rows, out):
    with MDSWriter(out=str(out / "data"), columns={"tokens": "ndarray:uint32"}) as writer:
        for row in rows:
            writer.write({"tokens": np.asarray(row, np.uint32)})


def collate(samples):
    return with_labels(torch.from_numpy(np.stack([each["tokens"] for each in samples]).astype(np.int64)))


def batches(out):
    clean_stale_shared_memory()
    data = StreamingDataset(
        local=str(out / "data"),
        shuffle=True,
        num_canonical_nodes=1,
        shuffle_block_size=1 << 18,
        batch_size=BATCH,
    )
    return epochs(DataLoader(data, batch_size=BATCH, collate_fn=collate, drop_last=True))


if __name__ == "__main__":
    run(prepare, batches)
