"""The on-disk contract, all of it; docs/format.md says it in prose, each module its part of it.

Writer and reader both stand on this package, so it needs little: numpy, orjson and msgspec. All
integers on disk are little-endian. A change of any byte that it describes is a new FORMAT_VERSION.

What reads a file raises NotFound or MissingShard where it is not there, BrokenShard where it is damaged,
UnknownVersion or OtherPlan where it is of another version or plan, and ReadWriteError where the file system
fails; what writes one raises CannotWrite or ReadWriteError. Docstrings name what is raised besides.
"""
