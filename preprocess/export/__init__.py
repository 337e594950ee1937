"""``shardprep export``: the token ids of a data set in the layouts of other tools, shard by shard."""
