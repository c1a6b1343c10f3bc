"""What a recorded step says of the device that ran it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from tests.one_peer import OnePeer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_unit_has_the_devices_time_beside_the_hosts(family_dir: Callable[..., Path], look_ahead: bool) -> None:
    peer = OnePeer(family_dir("qwen3_moe"), device="cuda", audit_rate=0.0, look_ahead=look_ahead)
    peer.loop.trace.record(0, 5)
    with peer:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        peer.loop.submit(Request("a", tuple(range(1, 30)), params))
        peer.outlet.until_ended("a")
    assert peer.raised is None
    steps, _, _ = peer.loop.trace.recorded()
    device = [span for step in steps for span in step.spans if span.on_device]
    assert [span.name for span in device][:2] == ["prefill", "decode"]
    assert len(device) >= len(steps) - look_ahead
    assert all(span.start < span.end for span in device)
    assert all(before.end <= after.start for before, after in pairwise(device))
