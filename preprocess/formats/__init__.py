"""The formats of raw input: one module per format, found by a file's name (``named``), one interface (``format``)."""
