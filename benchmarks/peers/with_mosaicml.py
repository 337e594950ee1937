"""MosaicML's MDSWriter as in llm-foundry: lines -> rows of 2,048 int32 ids, BOS and EOS inside."""

import sys
import types
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

# streaming imports torchvision for its vision data sets, and this may have no CPU build. The stub must come
# after the import of transformers, which would take it for the real torchvision.
CLASSES = {
    "torchvision": (),
    "torchvision.datasets": ("VisionDataset",),
    "torchvision.transforms": (),
    "torchvision.transforms.functional": ("to_tensor",),
}
for name, classes in CLASSES.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update({item: type(item, (), {}) for item in classes})

from streaming import MDSWriter  # noqa: E402

SEQ_LEN = 2048


def rows(path: Path, tokenizer):
    """Join documents and cut, as llm-foundry's ConcatTokensDataset does."""
    buffer = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if text := line.strip():
                encoded = tokenizer(text, truncation=False, padding=False)
                buffer = buffer + encoded["input_ids"] + [tokenizer.eos_token_id]
                while len(buffer) >= SEQ_LEN:
                    row, buffer = buffer[:SEQ_LEN], buffer[SEQ_LEN:]
                    yield {"tokens": np.asarray(row, dtype=np.int32)}


def main(documents: str, tokenizer_folder: str, output: str) -> None:
    """Tokenize ``documents``/documents.txt into ``output``."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    with MDSWriter(out=output, columns={"tokens": "ndarray:int32"}) as writer:
        for row in rows(Path(documents) / "documents.txt", tokenizer):
            writer.write(row)


if __name__ == "__main__":
    main(*sys.argv[1:])
