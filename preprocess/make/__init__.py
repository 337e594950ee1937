"""A shard is made here: text to token ids, to members of a tar, to a published shard."""
