"""CRC-32, as zip records carry it: isal's where it is installed (the extra `fast`), many times faster, else zlib's."""

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
