"""The formats of raw input: a module per format, found by name (``named``), one interface (``format``)."""
