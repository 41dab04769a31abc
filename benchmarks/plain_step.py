"""A training step of ours beside the same step written plainly in PyTorch: SimCLR on a small ViT, SGD, one process.

Both have the same network, loss and optimiser, and each batch is one that the other gets, too. Rounds alternate.

step        plain seconds of CPU time / ours: above 1 ours is faster
step_wall   the same by the clock on the wall
difference  largest relative difference of the first losses
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import common
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base.allocator import keep_freed_memory
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.engine.precision import Precision
from eagleray.engine.world import local
from eagleray.runs import recipe
from eagleray.runs.build import build_method, build_optimizer, make_trainer

RECIPE = Path(__file__).with_name("recipes") / "peer_simclr.yaml"
NETWORK, SIZE = "vit_tiny_patch16_224", 96
STEP = Progress(50_000, 1000, 100)  # in the middle of the training


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `pretrain` does
    torch.manual_seed(0)
    batches = [torch.randn(2, args.batch, 3, SIZE, SIZE) for _ in range(4)]
    ours, encoder = own_steps(batches, args.rounds + 2)
    plain = plain_steps(encoder, batches)
    losses = next(ours), plain(batches[0])
    times = common.alternate(
        {"ours": lambda _: next(ours), "plain": plain}, (batches[n % 4] for n in range(1, args.rounds + 2))
    )
    common.show(
        {
            "step": times["plain"].cpu / times["ours"].cpu,
            "step_wall": times["plain"].wall / times["ours"].wall,
            "ours_ms": 1000 * times["ours"].cpu,
            "plain_ms": 1000 * times["plain"].cpu,
            "difference": abs(losses[0] - losses[1]) / losses[1],
            "batch": args.batch,
        },
        as_json=args.json,
    )


def own_steps(batches: list[Tensor], steps: int) -> tuple[Iterator[float], nn.Module]:
    """Return the losses of our steps, and a copy of the encoder before the first."""
    rows = len(batches[0][0])
    keys = ["data.train=none", f"optim.batch={rows}", f"backbone.options.img_size={SIZE}", f"views.0.size={SIZE}"]
    chosen = recipe.load(str(RECIPE), keys)
    method = build_method(chosen)
    encoder = copy.deepcopy(method.encoder)
    assert isinstance(encoder, nn.Module)
    index, label = torch.arange(rows), torch.zeros(rows)
    given = ((STEP, Batch(views=list(batches[n % 4]), index=index, label=label, rows=(rows,))) for n in range(steps))
    precision = Precision.of(chosen.precision, local().device)
    taken = make_trainer(chosen, method, build_optimizer(chosen, method), precision).steps(given)
    return (float(step.values["loss"]) for step in taken), encoder


def plain_steps(encoder: nn.Module, batches: list[Tensor]) -> Callable[[Tensor], float]:
    """Return a function that takes a step on views (2, B, 3, S, S) and returns its loss."""
    network = timm.create_model(NETWORK, img_size=SIZE, num_classes=0)
    network.load_state_dict(encoder.backbone.model.state_dict())  # type: ignore[union-attr, operator]
    head = encoder.head
    parameters = [*network.parameters(), *head.parameters()]  # type: ignore[union-attr, operator]
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 1e-4}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.15, momentum=0.9)
    many = len(batches[0][0])
    positive = (torch.arange(2 * many) + many) % (2 * many)

    def step(views: Tensor) -> float:
        z = F.normalize(head(network(views.flatten(0, 1))))  # type: ignore[operator]
        logits = (z @ z.T / 0.1).fill_diagonal_(-torch.inf)
        loss = F.cross_entropy(logits, positive)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    common.run(main)
