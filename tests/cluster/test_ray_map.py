"""What a Ray task asks for."""

import pytest

from eagleray.base.errors import UserError
from eagleray.cluster.ray_map import gpu_share


def test_a_task_with_a_gpu_has_its_share_of_the_cpus_on_every_machine():
    nodes = [{"CPU": 96.0, "GPU": 8.0}, {"CPU": 30.0, "GPU": 4.0}, {"CPU": 4.0}]
    assert gpu_share(nodes) == {"num_gpus": 1, "num_cpus": 7}
    assert gpu_share([{"CPU": 1.0, "GPU": 2.0}]) == {"num_gpus": 1, "num_cpus": 1}
    with pytest.raises(UserError, match="none of the cluster's machines that are up has a GPU"):
        gpu_share([{"CPU": 4.0}])
