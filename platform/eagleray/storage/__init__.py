"""Reads and writes files and the objects of stores by URL.

URLs and byte ranges go in. Bytes come out, after retries and checks, from a cache if there is one.

May import: base."""
