"""Make, describe and draw data sets: turn public archives, folders or tables into indexed shards.

Folders, archives and tables go in; shards, their index and their card (dataset.json) come out.

May import: base, config, data, storage."""
