"""Zip archives, as torch reads and writes them."""
