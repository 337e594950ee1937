"""From shards to chunks: finding shards, reading samples, decoding ids.

``finding`` makes a ``ShardSet`` (``shards``) of what the user names. ``samples`` numbers its samples, and
reads them by ``reading``; ``chunks`` has what it returns.
"""
