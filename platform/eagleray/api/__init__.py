"""The Python API: the functions of `eagleray`, which the command line calls too.

Names, settings and paths go in; runs, modules, batches and numbers come out, and UserError where something is wrong.
Importing PyTorch takes seconds, so functions first check what they can without it, and then import it.

May import: base, cluster, config, curation, data, datasets, engine, evaluation, exports, models, reports, runs,
storage, sweeps, views."""
