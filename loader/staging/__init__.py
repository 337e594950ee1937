"""``python -m loader stage``: copies of the shards that a node's ranks will read, on its own disk."""
