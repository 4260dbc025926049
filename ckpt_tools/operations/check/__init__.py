"""What `ckpt check` does: read every byte once, judge structure and values, say what stands in the way of loading."""
