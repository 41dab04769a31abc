"""Reads shards as an exact, reproducible stream of training batches.

The URLs of indexed shards and a position in the stream go in. Batches on the device come out, the same for any number
of readers.

May import: base, config, storage, views.
"""
