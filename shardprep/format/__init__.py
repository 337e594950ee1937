"""The on-disk contract, all of it; docs/format.md says it in prose, each module its part of it.

Writer and reader both stand on this package, so it needs little: numpy, orjson and msgspec. All
integers on disk are little-endian. A change of any byte that it describes is a new FORMAT_VERSION.
"""
