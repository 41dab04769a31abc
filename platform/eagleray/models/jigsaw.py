"""Cuts images into the shuffled patches of a jigsaw puzzle (PIRL: Misra and van der Maaten 2019, arXiv:1912.01991).

B images on this rank, C channels."""

import torch
from torch import Tensor

from eagleray.base import dist
from eagleray.base.rng import step_generator

GRID = 3  # cells on a side
PATCHES = GRID * GRID


def jigsaw(images: Tensor, size: int, seed: int, rows: tuple[int, ...]) -> Tensor:
    """Return nine patches (B, 9, C, size, size) of each image (B, C, H, W), one from each cell of a 3 x 3 grid.

    The order of the patches is random. So is the position of each patch in its cell, as edges that continue in the next
    patch would tell the order. `rows` has the number of images of each rank; the draw does not depend on how ranks
    share the batch. `size` is at most a third of H and of W, rounded down."""
    height, width = images.shape[2] // GRID, images.shape[3] // GRID  # the height and width of a cell
    first, count = dist.offset(rows), sum(rows)
    generator, device = step_generator(seed, images.device), images.device

    def draw(most: int) -> Tensor:
        """Draw integers (B, 9) from 0 to `most`, one for every patch."""
        drawn = torch.randint(most + 1, (count, PATCHES), generator=generator, device=device)
        return drawn[first : first + len(images)]

    noise = torch.rand(count, PATCHES, generator=generator, device=device)[first : first + len(images)]
    cell = noise.argsort(stable=True)  # stable, as equal random numbers would have no fixed order
    pixels = torch.arange(size, device=device)
    y = (cell // GRID * height + draw(height - size)).unsqueeze(2) + pixels  # (B, 9, size)
    x = (cell % GRID * width + draw(width - size)).unsqueeze(2) + pixels
    image = torch.arange(len(images), device=device).view(-1, 1, 1, 1)
    # Contiguous, as images are: gradients take the memory layout of the network's input, and DDP would copy gradients
    # with another layout than the parameters.
    return images[image, :, y.unsqueeze(3), x.unsqueeze(2)].movedim(4, 2).contiguous()
