"""The on-disk contract, all of it; docs/format.md says it in prose.

Writer and reader both stand on this package, so it needs the standard library, numpy and orjson alone. All
integers on disk are little-endian. A change of any byte that it describes is a new FORMAT_VERSION.

Import from its modules, in the order in which each stands on those before it:

    input_formats the registry of input formats: suffixes, what offsets count, what reads them
    names         file names, keys, member names, limits, dtypes, the commands that messages recommend
    checked_json  reads a JSON file of the contract, with an error that names the key
    dataset_spec  what all shards of a data set have in common
    idx           shard-N.idx: where each sample is; crcs/shard-N.crc: the crc32 of its ids
    manifest      shard-N.json: what one shard holds, and whether it is done
                  and index.json, all manifests merged; osts.json: on which storage target each tar begins
    shards        a shard read back: ids, document starts and loss masks of its samples
"""
