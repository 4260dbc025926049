"""Fault injection: `python -m tests.faults`, or `make faults`. Every system call of what writes fails once, in every way."""
