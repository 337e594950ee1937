"""``loader.boundaries.sdpa_mask`` and ``block_mask``: masks for models of your own."""

from loader.batch.boundaries import block_mask as block_mask
from loader.batch.boundaries import sdpa_mask as sdpa_mask
