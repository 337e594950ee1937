"""The on-disk contract, all of it; docs/format.md says it in prose.

Writer and reader both stand on this package, so it needs nothing but the standard library and numpy. All
integers on disk are little-endian. A change of any byte that it describes is a new FORMAT_VERSION.

Import from its modules, in the order in which each stands on those before it:

    names         file names, keys, member names, limits, dtypes, the commands that messages recommend
    checked_json  reads a JSON file of the contract, with an error that names the key
    dataset_spec  what all shards of a data set have in common
    idx           shard-N.idx: where each sample is; crcs/shard-N.crc: the crc32 of its ids
    manifest      shard-N.json: what one shard holds, and whether it is done
    index         index.json: all manifests, merged
    osts          osts.json: on which Lustre storage target each tar begins
"""
