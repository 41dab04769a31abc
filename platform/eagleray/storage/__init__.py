"""Reads and writes files and the objects of stores by URL.

URLs and byte ranges go in; bytes come out, retried, verified and cached.

May import: base.
"""
