"""Signatures over the digests of a checkpoint's tensors: one stays valid in every container."""
