"""A checkpoint decoded: no bytes."""
