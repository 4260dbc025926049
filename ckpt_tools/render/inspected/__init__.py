"""The parts of the page of `ckpt inspect`: tensors as lines, in groups; several checkpoints as one table."""
