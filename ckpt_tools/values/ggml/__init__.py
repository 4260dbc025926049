"""The block types of ggml: their sizes, and the numbers that they mean."""
