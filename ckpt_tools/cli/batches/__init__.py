"""Commands on many inputs at once."""
