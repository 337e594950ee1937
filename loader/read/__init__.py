"""From shards to chunks: finding shards, reading samples, decoding ids."""
