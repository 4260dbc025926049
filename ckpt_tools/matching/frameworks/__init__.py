"""How Flax and Keras name and lay out the tensors of a layer, against torch."""
