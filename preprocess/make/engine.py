"""What an engine is: a tokenizer that encodes batches of texts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from preprocess.make.token_ids import TokenBatch
from preprocess.read.documents import DocumentBatch
from preprocess.read.formats import Texts
from shardprep.format.plan_options import MaskRule

Spans = Sequence[tuple[int, int]]  # characters [begin, end) of a text
Encode = Callable[[Texts, bool], TokenBatch]  # the flag says whether to add BOS and other special tokens
EncodeChat = Callable[[Texts, Sequence[Spans], MaskRule], TokenBatch]


class Engine(Struct, frozen=True, kw_only=True):
    """A tokenizer that encodes as ``tokenizer.encode(text, add_special_tokens=adds_special_tokens)`` does."""

    name: str  # gigatoken or tokenizers
    encode_with: Encode
    encode_chat: EncodeChat | None = None  # without special tokens, and with NO_LOSS in ids outside the spans
    adds_special_tokens: bool = True
    can_fork: bool = True  # False: it asks a process of its own

    @property
    def version(self) -> str:
        module = importlib.import_module(self.name)
        # For gigatoken it is in the name of the .dist-info folder. importlib.metadata would open 30 files.
        site = Path(str(module.__file__)).parent.parent
        names = (folder.name.removesuffix(".dist-info") for folder in site.glob(f"{self.name}-*.dist-info"))
        return str(getattr(module, "__version__", "") or next(names, "").partition("-")[2])

    def bare(self) -> Engine:
        """Return this engine without special tokens around a text."""
        return replace(self, adds_special_tokens=False)

    def encode(self, texts: Texts) -> TokenBatch:
        return self.encode_with(texts, self.adds_special_tokens)

    def encode_documents(
        self, documents: DocumentBatch, *, end_id: int | None = None, mask_rule: MaskRule = ""
    ) -> TokenBatch:
        """Encode a batch, and end each document with ``end_id``.

        For conversations, ``mask_rule`` decides which tokens the assistant wrote; other ids get NO_LOSS.
        """
        if "spans" in documents.columns:
            assert self.encode_chat is not None  # for conversations load_engine returns the reference
            return self.encode_chat(documents.texts, documents.columns["spans"], mask_rule)
        tokens = self.encode(documents.texts)
        if end_id is None:
            return tokens
        return TokenBatch(
            ids=np.insert(tokens.ids, tokens.offsets[1:], end_id),
            offsets=tokens.offsets + np.arange(len(tokens.offsets)),
        )
