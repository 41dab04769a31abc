"""What `eagleray evaluate` does: load a backbone, compute its features once, run the protocols, keep the results.

A backbone's name and data go in; results.json and pictures come out.

May import: base, config, cluster, data, engine, models, protocols, runs, storage, views.
"""
