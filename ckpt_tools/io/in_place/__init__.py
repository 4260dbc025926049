"""Edits of a file in its own place: the journal that makes them whole or undone, and how a half-edited file is read."""
