"""Reads shards as an exact, reproducible stream of training batches.

URLs of indexed shards and a position go in; batches on the device come out, the same for any number of readers.

May import: base, config, storage, views.
"""
