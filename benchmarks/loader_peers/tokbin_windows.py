"""tokbin's WindowDataset: windows of 2,048 tokens of a memory map, shuffled by torch's DataLoader."""

import os

import tokenizers
from measure import BATCH, SEQ_LEN, epochs, run, with_labels
from tokbin import Dataset, WriterConfig, read_source
from tokbin.adapters.torch import WindowDataset
from torch.utils.data import DataLoader


def prepare(rows, out):
    # It accepts no ids, but the texts of the rows give nearly the same ones.
    tokenizer = tokenizers.Tokenizer.from_file(f"{os.environ['BENCH_TOKENIZER']}/tokenizer.json")
    texts = (tokenizer.decode(row.tolist()) for row in rows)
    config = WriterConfig(eos_token="<|end_of_text|>")
    Dataset(out).write("text", texts, tokenizer, config=config)


def batches(out):
    windows = WindowDataset(read_source(out / "text"), SEQ_LEN)
    return map(with_labels, epochs(DataLoader(windows, batch_size=BATCH, shuffle=True)))


if __name__ == "__main__":
    run(prepare, batches)
