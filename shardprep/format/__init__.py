"""The on-disk format, as code; docs/format.md describes it in prose.

The writer and the reader both use this package, so it needs little: numpy, orjson and msgspec. All integers
on disk are little-endian. Any change of the bytes it describes needs a new FORMAT_VERSION.

Functions that read a file raise NotFound or MissingShard if it does not exist, BrokenShard if it is damaged,
UnknownVersion or OtherPlan if it is of another version or plan, and ReadWriteError if the file system fails.
Functions that write one raise CannotWrite or ReadWriteError. Docstrings name any other error.
"""
