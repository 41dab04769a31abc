"""Operations whose gradient has no fixed order on an accelerator are replaced where determinism is asked for."""

import torch
from helpers.simulated_device import DEVICE, simulated

from eagleray.engine.precision import Precision, numerics
from eagleray.models.variants import resample


def test_a_position_table_is_resampled_by_a_product() -> None:
    table = torch.randn(1, 1 + 14 * 14, 8)
    want = resample(table, (14, 14), (6, 6))
    with simulated(), numerics(Precision(torch.bfloat16, DEVICE), deterministic=True):
        here = table.to(DEVICE).requires_grad_()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            out = resample(here, (14, 14), (6, 6))
        names = set()
        node = out.grad_fn
        while node is not None:
            names.add(type(node).__name__)
            node = node.next_functions[-1][0] if node.next_functions else None
        assert not any("Upsample" in name for name in names), names
        out.sum().backward()
        assert here.grad is not None
        seen, grad = out.detach().cpu(), here.grad.cpu()
    torch.testing.assert_close(seen, want, rtol=1e-4, atol=1e-5)
    [expected] = torch.autograd.grad(resample(table.requires_grad_(), (14, 14), (6, 6)).sum(), table)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
