"""One training process: the loop, the optimisers, checkpoints, devices and exports.

A method, batches and an optimiser go in; steps, checkpoint files and exported weights come out.

May import: base, config, data, methods, models, storage, views."""
