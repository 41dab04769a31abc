"""RoIAlign of one box per image is torchvision's."""

import pytest
import torch
from torchvision.ops import roi_align as torchvision_roi_align

from eagleray.models.region_align import roi_align


@pytest.mark.parametrize("side", [2, 5, 14])
def test_it_is_torchvisions(side: int) -> None:
    maps = torch.randn(40, 3, 9, 12, dtype=torch.float64, requires_grad=True)
    first = torch.rand(40, 2, dtype=torch.float64) * 10 - 3  # some boxes reach beyond the map
    boxes = torch.cat([first, first + 0.1 + 11 * torch.rand(40, 2, dtype=torch.float64)], 1)
    rows = torch.arange(40, dtype=torch.float64).unsqueeze(1)
    want = torchvision_roi_align(maps, torch.cat([rows, boxes], 1), side, sampling_ratio=-1, aligned=True)
    ours = roi_align(maps, boxes, side)
    torch.testing.assert_close(ours, want)
    seed = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad((x * seed).sum(), maps)[0] for x in (ours, want)))
