"""Bytes of a file or an S3 object, by URL.

URLs and byte ranges go in; bytes come out, retried, verified and cached.

May import: base.
"""
