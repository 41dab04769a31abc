"""A trained ViT sees some of the patches of each image while training; momentum copies and evaluations see all."""

import pytest
import torch
from helpers.golden_cases import vit
from torch import Tensor, nn

from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.ema import ema_copy
from eagleray.models.tokens import allow_dropping, keep_patches

KINDS = {"class token": {}, "mean": {"pool": "mean"}, "batch norm": {"norm": "batch"}, "dino": {"position": "dino"}}


def network(**settings: str) -> Backbone:
    torch.manual_seed(0)
    net = vit(16, 4, 12, 2, 3, **settings)
    allow_dropping(net.model)
    keep_patches(net.model, 0.25)
    return net


def images(count: int = 5, size: int = 16) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def tokens_seen(net: Backbone) -> list[int]:
    """The numbers of tokens that the patch drop lets through, one for each call."""
    seen: list[int] = []
    net.model.patch_drop.register_forward_hook(lambda *args: seen.append(args[2].shape[1]))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_quarter_of_the_patches_is_seen_beside_the_class_token_another_one_each_time(kind: str) -> None:
    net, x = network(**KINDS[kind]), images()
    seen, prefix = tokens_seen(net), net.model.num_prefix_tokens
    first, second = net.pooled(x), net.pooled(x)
    assert seen == [prefix + 4, prefix + 4]
    assert (first - second).abs().max() > 1e-3
    keep_patches(net.model, 1.0)
    net(x)
    assert seen[-1] == prefix + 16


def test_views_of_several_sizes_lose_the_same_share_in_one_forward_and_apart() -> None:
    net, views = network(position="dino"), [images(), images(size=8)]
    seen = tokens_seen(net)
    assert [out.shape for out in net.pooled_sizes(views)] == [(5, 12), (5, 12)]
    net.micro_batch = 2
    net.pooled_sizes(views)
    assert set(seen) == {1 + 4, 1 + 1}


def test_evaluations_and_momentum_copies_see_all_patches() -> None:
    net, x = network(), images()
    teacher = ema_copy(Encoder(net, nn.Identity()))
    assert teacher.training
    seen, seen_by_teacher = tokens_seen(net), tokens_seen(teacher.backbone)
    teacher([x])
    assert seen_by_teacher == [17]
    whole = vit(16, 4, 12, 2, 3)
    whole.load_state_dict(net.state_dict())
    torch.testing.assert_close(teacher.backbone.pooled(x), whole.pooled(x))
    torch.testing.assert_close(net.eval()(x).patches, whole.eval()(x).patches)
    assert seen == [17]


def test_micro_batches_see_the_same_patches_in_the_backward_pass() -> None:
    net, x = network(), images(6)
    weight = torch.randn(12, generator=torch.Generator().manual_seed(2))

    def gradient(pooled: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((pooled * weight).square().sum(), [p for p in net.parameters() if p.requires_grad])

    torch.manual_seed(7)
    want = gradient(torch.cat([net.pooled(part) for part in x.split(2)]))
    net.micro_batch = 2
    torch.manual_seed(7)
    for ours, theirs in zip(gradient(net.pooled(x)), want, strict=True):
        torch.testing.assert_close(ours, theirs)
