"""CRC-32, as zip records carry it: isal's, many times faster; zlib's where there is no isal."""

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
