"""Sweeps: many runs of one recipe with other values, compared.

A sweep file goes in; trials, a table, plots and the best recipe come out.

May import: base, cluster, config, data, engine, methods, protocols, runs, storage.
"""
