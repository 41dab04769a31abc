"""Cuts images into the shuffled patches of a jigsaw puzzle (PIRL: Misra and van der Maaten 2019, arXiv:1912.01991).

B images on this rank, C channels.
"""

import torch
from torch import Tensor

from eagleray.base import dist
from eagleray.base.rng import step_generator

GRID = 3  # cells on a side
PATCHES = GRID * GRID


def jigsaw(images: Tensor, size: int, seed: int, rows: tuple[int, ...]) -> Tensor:
    """Return nine patches (B, 9, C, size, size) of each image (B, C, H, W), one from each cell of a 3 x 3 grid.

    Their order is random, and so is the position of each patch in its cell, because edges that continue in the next
    patch would tell the order. `rows` are the numbers of images of all ranks: the draw does not depend on how they
    share the batch. `size` is at most a third of H and of W, rounded down."""
    height, width = images.shape[2] // GRID, images.shape[3] // GRID  # the height and width of a cell
    first, count = dist.offset(rows), sum(rows)
    generator, device = step_generator(seed, images.device), images.device

    def draw(most: int) -> Tensor:
        """Draw a number from 0 to `most` for every patch (B, 9)."""
        drawn = torch.randint(most + 1, (count, PATCHES), generator=generator, device=device)
        return drawn[first : first + len(images)]

    noise = torch.rand(count, PATCHES, generator=generator, device=device)[first : first + len(images)]
    cell = noise.argsort(stable=True)  # stable, as equal numbers occur
    pixels = torch.arange(size, device=device)
    y = (cell // GRID * height + draw(height - size)).unsqueeze(2) + pixels  # (B, 9, size)
    x = (cell % GRID * width + draw(width - size)).unsqueeze(2) + pixels
    image = torch.arange(len(images), device=device).view(-1, 1, 1, 1)
    # Patches get the memory layout of the images: gradients of a network follow its input, and DDP would copy others.
    return images[image, :, y.unsqueeze(3), x.unsqueeze(2)].movedim(4, 2).contiguous()
