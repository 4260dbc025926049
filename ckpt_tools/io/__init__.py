"""Bytes in, bytes out; knows no tensor."""
