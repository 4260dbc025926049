"""Tree to tree."""
