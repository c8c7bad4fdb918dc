"""What the loop works out beside the step's own metrics."""

from dataclasses import dataclass
from typing import Any

import pytest

from jaxrl_llm.models.flops import peak_flops
from jaxrl_llm.train.loop import Compute, hbm_peak, utilisation


@dataclass
class Device:
    stats: Any
    process_index: int = 0

    def memory_stats(self):
        return self.stats


def test_the_largest_memory_of_this_processs_devices():
    one, other = Device({"peak_bytes_in_use": 3}), Device({"peak_bytes_in_use": 7})
    elsewhere = Device({"peak_bytes_in_use": 9}, process_index=1)
    assert hbm_peak([one, other, elsewhere]) == {"hbm_peak_bytes": 7}


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5}])
def test_a_backend_that_does_not_say_gives_no_key(stats):
    assert hbm_peak([Device(stats)]) == {}


def test_utilisation_is_a_share_of_all_the_trainers_devices():
    compute = Compute(float, float, 6, (Device(None), Device(None)), 100e12)
    assert utilisation(compute, 50e12) == 0.25
    assert utilisation(Compute(float, float, 6, (Device(None),), None), 50e12) is None


def test_peaks_of_known_kinds_alone():
    # As published: cloud.google.com/tpu/docs (v5e, v5p) and NVIDIA's H100 datasheet, dense.
    assert (peak_flops("TPU v5 lite"), peak_flops("TPU v5p"), peak_flops("NVIDIA H100 80GB HBM3")) == (
        197e12,
        459e12,
        989e12,
    )
    assert peak_flops("cpu") is None
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None  # a seventh of one
