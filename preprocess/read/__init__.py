"""The formats of raw input: a module per format, found by name (``named``), one interface (``format``)."""

BATCH_BYTES = 512 << 10  # of raw text in a batch; 128 KiB to 2 MiB take the same time
