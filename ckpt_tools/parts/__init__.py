"""Checkpoints in parts of many ranks."""
