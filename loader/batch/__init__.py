"""From chunks to the batches of a rank, in order."""
