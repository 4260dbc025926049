"""Files around a checkpoint: compressed ones, and tars of a checkpoint with what belongs to it."""
