"""A checkpoint into a target."""
