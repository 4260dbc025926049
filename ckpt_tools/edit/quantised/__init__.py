"""Quantised weights: which tensors are the codes and scales of one, by names, dtypes, shapes; and the plain weight of them."""
