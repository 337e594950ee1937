"""``loader.boundaries.sdpa_mask`` and others: what models need of document boundaries."""

from loader.train.boundary_check import check_boundaries as check_boundaries
from loader.train.document_masks import block_mask as block_mask
from loader.train.document_masks import mask_documents as mask_documents
from loader.train.document_masks import sdpa_mask as sdpa_mask
