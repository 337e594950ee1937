"""Which shards there are: from what a user names to one numbered sequence of samples."""
