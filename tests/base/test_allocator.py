"""A training process keeps the memory of freed tensors."""

import subprocess
import sys

import pytest

FREE = """
import torch
from eagleray.base.allocator import give_back, keep_freed_memory
if {keeps}:
    assert keep_freed_memory()
pages = lambda: int(open("/proc/self/statm").read().split()[1])
x = torch.ones(100 * 2**18)  # 100 MiB
full = pages()
del x
kept = pages()
give_back()
print(full - kept, full - pages())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_the_memory_of_a_freed_tensor_is_kept_until_it_is_given_back() -> None:
    at_once, later = (
        map(int, subprocess.check_output([sys.executable, "-c", FREE.format(keeps=keeps)]).split())
        for keeps in (False, True)
    )
    assert min(at_once) > 25000  # pages of 4 KiB
    kept, given_back = later
    assert kept < 100
    assert given_back > 25000
