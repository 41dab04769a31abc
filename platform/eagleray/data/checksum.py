"""The checksum of an image's bytes, CRC-32 as zlib computes it."""

try:
    from isal.isal_zlib import crc32  # six times faster than zlib's
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
