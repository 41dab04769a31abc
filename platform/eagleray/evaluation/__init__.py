"""Implement `eagleray evaluate`: load a backbone, extract its features once, run the protocols and store their results.

A backbone's name and data go in; results.json and pictures come out.

May import: base, config, cluster, data, dense, engine, models, protocols, runs, storage."""
