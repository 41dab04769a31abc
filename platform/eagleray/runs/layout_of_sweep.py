"""Name the files in the folder of a sweep, each name once."""

SWEEP = "sweep.yaml"  # the sweep with which the folder was begun
ROWS = "trials.jsonl"  # a row for each trial
REPORTS = "reports.jsonl"  # values of the objective
TABLE = "trials.csv"
BEST = "best.yaml"  # the recipe of the best trial
PLOTS = ("keys.png", "parallel.png", "curves.png")
FILES = (SWEEP, ROWS, REPORTS, TABLE, BEST, *PLOTS)
