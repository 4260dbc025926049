"""Python objects made plain data."""
