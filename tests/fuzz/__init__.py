"""A structure-aware fuzzer: `python -m tests.fuzz`, or `make fuzz`. It attacks ckpt_tools with mutated checkpoints."""
