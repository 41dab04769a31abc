"""Data sets are made, described and drawn: from public archives, folders or tables to indexed shards.

Folders, archives and tables go in; shards, an index and a card come out.

May import: base, config, data, storage.
"""
