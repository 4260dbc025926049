"""What `ckpt repair` does: find what is whole in a damaged file, mend what hurts in a whole one, write the result."""
