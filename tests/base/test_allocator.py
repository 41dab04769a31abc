"""A training process keeps the memory of freed tensors."""

import subprocess
import sys

import pytest

COUNT = """
import resource, torch
from eagleray.base.allocator import keep_freed_memory
if {keeps}:
    assert keep_freed_memory()
[torch.ones(2**22) for _ in range(6)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    [torch.ones(2**22) for _ in range(6)]  # 16 MiB each
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_memory_is_used_again() -> None:
    faults = [
        int(subprocess.check_output([sys.executable, "-c", COUNT.format(keeps=keeps)])) for keeps in (False, True)
    ]
    assert faults[1] < faults[0] / 2
