"""Heads normalise each view by its own statistics over all ranks, and exchange those of all views at once."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import on_ranks
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.models.batch_norm import each_view, sync_batch_norms
from eagleray.models.heads import mlp

ROWS = (3, 5)  # each rank has its own number


def measured(head: nn.Sequential, views: list[Tensor], together: bool) -> tuple[list[Tensor], list[str]]:
    """Return outputs, gradients and buffers of a head over all ranks, and the exchanges that were made."""
    head, exchanges = copy.deepcopy(head), []
    own = [v.split(ROWS)[dist.rank()].clone().requires_grad_() for v in views]
    kept = dist.gather, dist.total
    dist.gather = lambda *args: (exchanges.append("gather"), kept[0](*args))[1]  # type: ignore[assignment, func-returns-value]
    dist.total = lambda x: (exchanges.append("total"), kept[1](x))[1]  # type: ignore[assignment, func-returns-value]
    try:
        outs = each_view(head, own) if together else [head(x) for x in own]
        sum((out * torch.arange(out.numel()).view_as(out).cos()).sum() for out in outs).backward()  # type: ignore[union-attr]
    finally:
        dist.gather, dist.total = kept
    grads = [x.grad for x in own] + [p.grad for p in head.parameters()]
    return [*outs, *grads, *head.buffers()], exchanges  # type: ignore[list-item]


def compared(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    head = mlp([6, 9, 9, 4], norm=True, last_norm=True).to(dtype)
    sync_batch_norms(head, torch.device("cpu"))
    views = [scale + scale * torch.randn(sum(ROWS), 6, dtype=dtype) for scale in (1, 4)]
    (found, exchanges), (expected, _) = (measured(head, views, together) for together in (True, False))
    return [x.detach() for x in found], [x.detach() for x in expected], exchanges


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_views_are_normalised_apart_with_one_exchange_of_a_layer(
    dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    for found, expected, exchanges in on_ranks(2, compared, tmp_path, dtype):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert exchanges == ["gather"] * 3 + ["total"] * 3


def of_16_bits(x: Tensor) -> Tensor:
    norm: Any = sync_batch_norms(nn.Sequential(nn.BatchNorm1d(6)), torch.device("cpu"))[0]  # type: ignore[index]
    assert norm(x.split(ROWS)[dist.rank()]).dtype == x.dtype
    return torch.stack([norm.running_mean, norm.running_var])


def test_16_bits_are_summed_in_float32(tmp_path: Path) -> None:
    x, whole = (3 + torch.randn(sum(ROWS), 6)).bfloat16(), nn.BatchNorm1d(6)
    whole(x.float())
    assert whole.running_mean is not None
    assert whole.running_var is not None
    for found in on_ranks(2, of_16_bits, tmp_path, x):
        torch.testing.assert_close(found, torch.stack([whole.running_mean, whole.running_var]))
