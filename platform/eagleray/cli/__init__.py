"""The command line: it parses arguments, calls the API and prints.

Arguments go in; text, files and an exit status come out.

May import: base, cluster, config, data, datasets, engine, evaluation, methods, models,
protocols, reports, runs, storage, sweeps.
"""
