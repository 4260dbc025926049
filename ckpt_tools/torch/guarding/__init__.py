"""What somebody else's loading code did to a model: which file each tensor is from, and which one still is as it was made."""
