"""`ckpt diff` and `ckpt stats`."""
