"""A training process keeps the memory of freed tensors."""

import subprocess
import sys

import pytest

FREE = """
import torch
from eagleray.base.allocator import keep_freed_memory
if {keeps}:
    assert keep_freed_memory()
pages = lambda: int(open("/proc/self/statm").read().split()[1])
x = torch.ones(100 * 2**18)  # 100 MiB
full = pages()
del x
print(full - pages())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_the_memory_of_a_freed_tensor_is_kept() -> None:
    given_back = [
        int(subprocess.check_output([sys.executable, "-c", FREE.format(keeps=keeps)])) for keeps in (False, True)
    ]
    assert given_back[0] > 25000  # pages of 4 KiB
    assert given_back[1] < 100
