"""Define every metric that a run reports, in one place: its key, its meaning, its unit and where it is shown."""

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """A number of metrics.jsonl or summary.json, with its description for gauges, plots, sweeps and reports."""

    key: str
    label: str  # the label of an axis or a tile
    about: str = ""  # a sentence; empty: the label says enough
    better: Literal["higher", "lower", ""] = ""
    when: Literal["log", "look", "evaluation", "end"] = "log"  # which lines have the number; end: only summary.json
    compared: bool = False  # whether several runs are drawn in one plot
    log_axis: bool = False
    gauge: str = ""  # name of its gauge in Prometheus, without the prefix

    @property
    def meaning(self) -> str:
        return self.about or self.label


LOSS, LR, GRAD_NORM, LOSS_SCALE = "loss", "lr", "grad_norm", "loss_scale"
IMAGES_PER_S, DATA_WAIT, GOODPUT = "images_per_s", "data_wait", "goodput"
BAD_SAMPLES, SKIPPED_STEPS, RESTARTS, SECONDS_LOST = "bad_samples", "skipped_steps", "restarts", "seconds_lost"
STEPS_REPEATED, WALL_SECONDS = "steps_repeated", "wall_seconds"
MFU, MEMORY_PEAK = "mfu", "memory/peak"
MONITOR_KNN = "monitor/knn"
KNN_TOP1, KNN_TOP5, LINEAR_TOP1 = "knn/top1", "knn/top5", "linear/top1"
CROPS_FOUND, CROPS_LIDAR, LIDAR_ERROR = "crops/found", "crops/lidar", "crops/lidar_error"
CLASSIFIER_TOP1, CLASSIFIER_TOP5 = "classifier/top1", "classifier/top5"
CLASSIFIER_MEAN = "classifier/mean_per_class"
UNTRAINED = "_untrained"  # ending of the keys of an untrained backbone's scores
AT_START = "_start"  # ending of the keys of the scores of the backbone that the run started from
START_KNN, START_FOUND, START_CKA, START_RANK = "start/knn", "start/found", "start/cka", "start/rank"

METRICS = {
    m.key: m
    for m in (
        Metric("step", "step", "Steps taken", gauge="step"),
        Metric("epoch", "epoch", "Epochs taken", gauge="epoch"),
        Metric(LOSS, "loss", "Loss", "lower", compared=True, gauge="loss"),
        Metric(MONITOR_KNN, "kNN monitor, top-1 %", "Neighbours of the same class among recent images", "higher",
               "look", compared=True, gauge="monitor_knn"),
        Metric(KNN_TOP1, "kNN evaluation, top-1 %", "kNN accuracy during training", "higher", "evaluation",
               compared=True, gauge="knn_accuracy_percent"),
        Metric(KNN_TOP5, "kNN evaluation, top-5 %", "", "higher", "evaluation"),
        Metric(LINEAR_TOP1, "linear, top-1 %", "Linear probe on cached features of centre crops, not the papers' one",
               "higher", "end"),
        Metric(CROPS_FOUND, "crops found, %", "How often a second crop of an image finds its own image, without labels",
               "higher", "end"),
        Metric(CROPS_LIDAR, "LiDAR of crops", "In how many directions images differ more than crops of an image",
               "higher", "end"),
        Metric(CLASSIFIER_TOP1, "classifier, top-1 %", "", "higher", "evaluation", compared=True),
        Metric(CLASSIFIER_TOP5, "classifier, top-5 %", "", "higher", "evaluation"),
        Metric(CLASSIFIER_MEAN, "classifier, mean of classes %", "", "higher", "evaluation"),
        Metric("accuracy", "accuracy", "Share of the training images that are classified right", "higher",
               compared=True),
        Metric(LR, "learning rate", "Learning rate of the last step", compared=True, gauge="learning_rate"),
        Metric(GRAD_NORM, "gradient norm", "Norm of all gradients together, before clipping", compared=True,
               log_axis=True, gauge="gradient_norm"),
        Metric(LOSS_SCALE, "loss scale", "Factor of the loss in float16", log_axis=True),
        Metric("health/backbone_std", "spread of the backbone", "", "higher", "look", compared=True),
        Metric("health/backbone_rank", "rank of the backbone", "Effective rank of the backbone's features", "higher",
               "look", compared=True, gauge="backbone_rank"),
        Metric("health/projector_std", "spread of the projections", "", "higher", "look"),
        Metric("health/projector_rank", "rank of the projections", "", "higher", "look"),
        Metric("health/uniformity", "uniformity", "", "lower", "look"),
        Metric("health/alignment", "alignment", "", "lower", "look"),
        Metric("entropy", "targets' entropy, share of ln K", compared=True),
        Metric("usage", "usage of prototypes, share of ln K", "", "higher"),
        Metric("gain", "gain, nats", "Gain of the contrastive task over a guess, in nats", "higher", compared=True),
        Metric("health/update", "share moved by a step", "", when="look", compared=True, log_axis=True),
        Metric("health/growth", "growth of the weights", "", when="look"),
        Metric("health/ema_distance", "distance from the momentum copy", "", when="look"),
        Metric(START_KNN, "kNN guard, top-1 %", "kNN accuracy among images that were embedded at the start, too",
               "higher", "look", compared=True),
        Metric(START_FOUND, "crops found by the guard, %", "Crops found of images that were embedded at the start, too",
               "higher", "look", compared=True),
        Metric(START_CKA, "likeness to the start, CKA", "Likeness of features to those at the start, from 0 to 1",
               "higher", "look", compared=True),
        Metric("anchor", "loss of the anchor", "How far the similarities of patches are from those at the start",
               "lower", compared=True),
        Metric(START_RANK, "rank of these features", "", "higher", "look"),
        Metric(IMAGES_PER_S, "images/s", "Images per second over all workers", "higher", compared=True,
               gauge="images_per_second"),
        Metric(DATA_WAIT, "share of time waiting for data", "Share of the time in which a run waits for data", "lower",
               compared=True, gauge="data_wait_ratio"),
        Metric(MFU, "model FLOP utilisation", "FLOPs of the model as a share of the device's peak", "higher",
               compared=True, gauge="model_flop_utilisation_ratio"),
        Metric(MEMORY_PEAK, "peak memory, GiB", "Peak memory of the tensors on an accelerator so far", "lower",
               gauge="memory_peak_gib"),
        Metric(BAD_SAMPLES, "bad samples", "Bad samples so far", "lower", gauge="bad_samples"),
        Metric(SKIPPED_STEPS, "skipped steps", "Steps without a finite gradient since the last line", "lower"),
        Metric(GOODPUT, "goodput", "Share of the time that went into steps that count", "higher",
               gauge="goodput_ratio"),
        Metric(RESTARTS, "restarts", "Restarts so far", "lower", gauge="restarts"),
        Metric(STEPS_REPEATED, "steps repeated", "Steps taken again after restarts", "lower", gauge="steps_repeated"),
        Metric(SECONDS_LOST, "seconds lost", "Seconds without steps that count", "lower", gauge="lost_seconds"),
        Metric(WALL_SECONDS, "duration, s", "Seconds of all starts together, without what was lost", "lower", "end"),
    )
}  # fmt: skip

# Keys of the accuracies of methods that learn from labels (CLASSIFIED) and of frozen features (FROZEN).
CLASSIFIED = (CLASSIFIER_TOP1, CLASSIFIER_TOP5, CLASSIFIER_MEAN)
FROZEN = (LINEAR_TOP1, KNN_TOP1, KNN_TOP5)


def full_name(key: str) -> str:
    """Return the full key of a metric whose ending `/top1` may have been left out, such as `knn/top1` for `knn`."""
    return f"{key}/top1" if f"{key}/top1" in METRICS else key
