"""Reads and writes files and S3 objects by URL.

URLs and byte ranges go in; bytes come out, retried, verified and cached.

May import: base.
"""
