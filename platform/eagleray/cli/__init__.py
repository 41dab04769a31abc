"""The command line: it parses arguments, calls the API and prints.

Arguments go in; text, files and an exit status come out.

May import: api, base, cluster, config, data, datasets, evaluation, methods, models, runs, storage."""
