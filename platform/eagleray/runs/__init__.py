"""One pretraining run, from its recipe to its last checkpoint, with everything that it writes.

A recipe goes in; a run folder with checkpoints, metrics and an export comes out.

May import: base, config, data, datasets, engine, losses, methods, models, protocols, storage, views."""
