"""A structure-aware fuzzer: `python -m fuzz`, or `make fuzz`. It mutates good checkpoints and attacks ckpt_tools with them."""
