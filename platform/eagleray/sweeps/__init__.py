"""Sweeps: many runs of one recipe with different values, which are compared.

A sweep file goes in; trials, a table, plots and the best recipe come out.

May import: base, cluster, config, data, engine, methods, protocols, runs, storage."""
