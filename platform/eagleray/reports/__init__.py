"""Runs, evaluations, sweeps and data sets become one HTML page.

Run folders or shards go in; a page that needs no other file comes out.

May import: base, config, curation, data, datasets, evaluation, runs, storage, sweeps."""
