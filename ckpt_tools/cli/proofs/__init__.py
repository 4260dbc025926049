"""Commands that prove something of a checkpoint: that it computes the same, that it is what was signed."""
