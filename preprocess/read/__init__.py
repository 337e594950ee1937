"""Readers of raw input. documents.py has their interface, ``Format``, and finds one by a file's name."""

BATCH_BYTES = 512 << 10  # of raw text in a batch; 128 KiB to 2 MiB take the same time
