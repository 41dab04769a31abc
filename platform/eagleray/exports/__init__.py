"""Exports: a run's backbone as files that another library loads, with its preprocessing and a card.

A run or a checkpoint goes in; a folder comes out, after that library has loaded it in a new process.

May import: base, config, data, engine, evaluation, methods, models, runs, views."""
