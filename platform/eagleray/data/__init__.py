"""Reads shards as an exact, reproducible stream of training batches.

The URLs of indexed shards and a step go in. The batches from this step on come out, on the device and the same for any
number of ranks and loader processes.

May import: base, config, storage, views."""
