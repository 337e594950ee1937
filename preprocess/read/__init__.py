"""Readers of raw input. documents.py has their interface, ``Format``, and finds one by a file's name."""
