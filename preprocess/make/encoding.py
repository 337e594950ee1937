"""Encode a batch of documents and lay out its members, which depend on no other batch."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from preprocess.make.engine import Engine
from preprocess.make.layout import BatchLayout
from preprocess.make.pieces import EncodedBatch
from preprocess.make.token_ids import NO_LOSS, TokenBatch
from preprocess.read.documents import DocumentBatch
from preprocess.read.formats import Texts
from shardprep.format import names
from shardprep.format.blanked import BlankedDocuments, blank_digests, read_blanked
from shardprep.format.data_folder import DataFolder
from shardprep.format.documents import are_for_validation
from shardprep.format.plan import Plan
from shardprep.format.spec import BLANK


def read_blanked_of(plan: Plan, folder: DataFolder, shard_id: int) -> BlankedDocuments | None:
    """Return the documents of a shard that are blanked, or None if there are none."""
    if not plan.options.blanked or shard_id not in names.ids_of_ranges(plan.options.blanked):
        return None
    return read_blanked(folder, plan, shard_id)


class BatchEncoder(Struct, frozen=True, kw_only=True):
    """Encodes batches of one shard. Threads and processes may share it."""

    plan: Plan
    engine: Engine
    layout: BatchLayout
    blanked: BlankedDocuments | None

    def encode(self, documents: DocumentBatch) -> EncodedBatch:
        """Encode a batch and lay out its members. Raises BadInput, OtherTokenizer."""
        mask_rule = self.plan.options.chat_mask_rule
        tokens = self.engine.encode_documents(documents, end_id=self.plan.end_id, mask_rule=mask_rule)
        if self.blanked is None:
            return self.layout.lay_out(documents, tokens)
        return self._lay_out_blanked(self.blanked, documents, tokens)

    def _lay_out_blanked(
        self, blanked: BlankedDocuments, documents: DocumentBatch, tokens: TokenBatch
    ) -> EncodedBatch:
        # The token ids of a blanked document become BLANK; its text, id and digest are removed. All documents
        # are counted as before, so the counts equal those of the shard that this one replaces.
        options = self.plan.options
        is_blanked = blanked.are_at(documents.input_number, documents.offsets)
        blank_ids = np.uint32(BLANK)
        if options.is_chat:  # keep the loss mask
            blank_ids = (tokens.ids & NO_LOSS) | blank_ids
        ids = np.where(np.repeat(is_blanked, np.diff(tokens.offsets)), blank_ids, tokens.ids)
        digests = None
        if options.digests:
            digests = documents.digests()
            sides = are_for_validation(digests, self.plan.spec.validation_fraction)
            digests = np.where(is_blanked, blank_digests(sides), digests)
        columns = dict(documents.columns)
        if "id" in columns:
            ids_of = zip(columns["id"], is_blanked, strict=True)
            columns["id"] = ["" if blank else name for name, blank in ids_of]
        texts = [b"" if blank else text for text, blank in zip(documents.texts, is_blanked, strict=True)]
        return self.layout.lay_out(
            replace(documents, texts=Texts(texts)),
            replace(tokens, ids=ids),
            digests,
            before_blanking=replace(documents, columns=columns),
        )
