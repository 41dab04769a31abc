"""LightlyTrain's part of `peers.py`, in an environment of its own: it imports nothing of ours.

    python peers_lightly_train.py WHAT FOLDER BATCH

Every line on stdin asks for a batch of views of the images in FOLDER (`input_*`) or for a training step on such a batch
(`step_*`); the answer is a line on stdout with its seconds on the clock and of CPU time. WHAT is a key of `peers.py`.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"LIGHTLY_TRAIN_EVENTS_DISABLED": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from lightly_train._data.image_dataset import ImageDataset
from lightly_train._methods.dino.dino import DINO, DINOAdamWArgs, DINOArgs
from lightly_train._methods.dino.dino_transform import (
    DINOLocalViewRandomResizedCropArgs,
    DINOLocalViewTransformArgs,
    DINORandomResizedCropArgs,
    DINOTransform,
    DINOTransformArgs,
)
from lightly_train._methods.simclr.simclr import SimCLR, SimCLRArgs, SimCLRSGDArgs
from lightly_train._methods.simclr.simclr_transform import SimCLRTransform, SimCLRTransformArgs
from lightly_train._models import package_helpers
from lightly_train._models.embedding_model import EmbeddingModel
from lightly_train._scaling import IMAGENET_SIZE, ScalingInfo
from pytorch_lightning import Trainer
from torch.utils.data import DataLoader, IterableDataset, default_collate

STEPS = 10_000  # of the training that is under way


def main() -> None:
    torch.set_num_threads(1)
    what, folder, batch = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what packages print is no answer
        served = Served(ImageDataset(folder, sorted(os.listdir(folder)), transform(what), 3), batch, answers)
        if what.startswith("input"):
            for _ in served:
                pass
        else:
            trainer = Trainer(
                max_steps=STEPS,
                max_epochs=1,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(method(what, batch), DataLoader(served, batch_size=None))


class Served(IterableDataset[Any]):
    """Batches on request. What is done with one, until the next is asked for, is on its clock."""

    def __init__(self, images: ImageDataset, batch: int, answers: Any) -> None:
        self.images, self.batch, self.answers = images, batch, answers

    def __len__(self) -> int:
        return STEPS  # or Lightning would ask for a batch in advance

    def __iter__(self) -> Iterator[Any]:
        number = 0
        for _ in sys.stdin:
            wall, cpu = time.perf_counter(), time.process_time()
            rows = [(number + i) % len(self.images) for i in range(self.batch)]
            yield default_collate([self.images[row] for row in rows])
            number += self.batch
            answer = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            print(json.dumps(answer), file=self.answers, flush=True)


def transform(what: str) -> Any:
    """The views of recipes/peer_simclr.yaml and peer_dino.yaml; all else is a default of LightlyTrain's."""
    if what in ("input_two_view", "step_simclr"):
        return SimCLRTransform(SimCLRTransformArgs(num_channels=3))
    local = DINOLocalViewTransformArgs(
        num_views=8, random_resize=DINOLocalViewRandomResizedCropArgs(min_scale=0.05, max_scale=0.4)
    )
    large = DINORandomResizedCropArgs(min_scale=0.4)
    return DINOTransform(DINOTransformArgs(num_channels=3, random_resize=large, local_view=local))


def method(what: str, batch: int) -> Any:
    wrapped = package_helpers.get_wrapped_model("timm/vit_tiny_patch16_224", num_input_channels=3)
    model = EmbeddingModel(wrapped)
    common = {"embedding_model": model, "global_batch_size": batch, "num_input_channels": 3}
    if what == "step_simclr":
        return SimCLR(method_args=SimCLRArgs(), optimizer_args=SimCLRSGDArgs(), **common)
    settings, optimizer = DINOArgs(student_freeze_last_layer_steps=0), DINOAdamWArgs()
    settings.resolve_auto(ScalingInfo(dataset_size=IMAGENET_SIZE, epochs=100), optimizer, wrapped)
    return DINO(method_args=settings, optimizer_args=optimizer, **common)


if __name__ == "__main__":
    main()
