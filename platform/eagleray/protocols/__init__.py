"""Evaluation as a library: each protocol measures a backbone.

A backbone and labelled images or features go in; named numbers and pictures come out.

May import: base, config, data, datasets, engine, models, storage, views."""
