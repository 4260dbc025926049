"""Plans for a family of models: patterns of names, sizes by name, and what becomes of them for one checkpoint."""
