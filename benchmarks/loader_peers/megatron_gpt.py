"""Megatron-core: GPTDataset over an IndexedDataset, through the builder that its pretraining uses.

BENCH_DOCUMENT_TOKENS is the length of its documents, which are joined into rows. It uses its own shuffle, and
no attention mask, which its attention kernels make themselves.
"""

import os
from types import SimpleNamespace

import numpy as np
from measure import BATCH, SEQ_LEN, epochs, run
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch.utils.data import DataLoader

# The tokenizer attributes that the data set needs. No id of the text is one of these.
TOKENIZER = SimpleNamespace(
    eod=128_254, pad=128_255, vocab_size=128_256, unique_identifiers={"name": "bench"}
)


def prepare(rows, out):
    length = int(os.environ.get("BENCH_DOCUMENT_TOKENS", SEQ_LEN))
    ids = rows.reshape(-1)
    builder = IndexedDatasetBuilder(str(out / "tokens.bin"), dtype=np.int32)
    for document in ids[: ids.size // length * length].reshape(-1, length):
        builder.add_document(document.astype(np.int32), [length])
    builder.finalize(str(out / "tokens.idx"))


def batches(out):
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQ_LEN,
        blend=([str(out / "tokens")], None),
        split="1",
        tokenizer=TOKENIZER,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(out / "cache"),
    )
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, config).build()
    for batch in epochs(DataLoader(train, batch_size=BATCH, drop_last=True)):
        yield {"input_ids": batch["tokens"], "labels": batch["labels"]}


if __name__ == "__main__":
    run(prepare, batches)
