"""Name the files in the folder of a run and in that of a sweep, each name once."""

RECIPE = "recipe.yaml"  # the resolved recipe
ENVIRONMENT = "environment.json"  # packages, machine and command
FORECAST = "plan.json"  # what was expected of the run's memory and speed
CHOICE = "choice.json"  # the samples that the run reads, with some images of them and of the others
PROFILE = "profile"  # a folder: a trace of some steps, and a table of their dearest operations
METRICS = "metrics.jsonl"  # a line every `log_steps` steps
STEPS = "steps.jsonl"  # a line for each step: its loss and its gradient norm
HEALTH = "health.jsonl"  # a line for each finding
HEALTH_PLOT = "health.png"
NEIGHBOURS = "neighbours.png"  # some images at the end of the run, each with those nearest to it
STARTS = "starts.jsonl"  # a line for each start, each last step and each orderly end
QUARANTINE = "quarantine.jsonl"  # a line for each bad sample
SKIPPED = "skipped.jsonl"  # a line for each step whose gradient was not finite
START = "start.txt"  # what the run took over by `start`, and what not
START_SCORES = "start.json"  # numbers of the backbone that the run started from
TEACHER = "teacher.txt"  # what the frozen teacher took over from `method.teacher.weights`
WEIGHTS = "weights.txt"  # what the backbone took over from `backbone.weights`
SUMMARY = "summary.json"  # the numbers of a finished run
EVALUATION_STARTS = "evaluation_starts"  # a key of it while its scores are missing: how often they were begun
EVALUATION = "evaluation.json"  # the step of the last evaluation during training, and how often it was begun
RESULTS = "results.json"  # written by `eagleray evaluate`
LOG = "train.log"
RAY_LOG = "ray.log"  # what Ray's libraries print in the process that directs the run
PLACES = "checkpoints.json"  # the places of the checkpoints of a run that has ended
TENSORBOARD, WANDB = "tensorboard", "wandb"  # folders of event files, where the recipe asks for them
WANDB_ID = f"{WANDB}/id"  # the id of the run in Weights & Biases
MLFLOW = "mlflow.json"  # the id of the run in MLflow
CHECKPOINTS = "checkpoints"  # a folder
EXPORT = "export"  # a folder: the backbone for timm
PICTURES = "pictures"  # a folder: what evaluations have drawn
# Notes between processes. They are removed when the run starts again.
STOP = ".stop"  # somebody asks the run to save and stop; a command asks its own by .stop-<id of the command>
FAILURE = ".failure"  # why no restart can mend the run
FAILED = ".failed"  # why a trial is over
COMMAND = ".command"  # the command that holds the run: a lock, or in a bucket the prefix of its claims
OWNER = ".owner"  # the rank that writes the run, in the same way
PLACEMENT = ".placement"  # what the workers of a trial hold on the cluster
# Files in the folder of a sweep.
SWEEP = "sweep.yaml"  # the sweep with which the folder was begun
SWEEP_ROWS = "trials.jsonl"  # a row for each trial
SWEEP_REPORTS = "reports.jsonl"  # values of the objective
SWEEP_TABLE = "trials.csv"
SWEEP_BEST = "best.yaml"  # the recipe of the best trial
SWEEP_COMPARISON = "alternatives.csv"  # each alternative at its best
SWEEP_PLOTS = ("alternatives.png", "keys.png", "parallel.png", "curves.png")
SWEEP_FILES = (SWEEP, SWEEP_ROWS, SWEEP_REPORTS, SWEEP_TABLE, SWEEP_BEST, SWEEP_COMPARISON, *SWEEP_PLOTS)
