"""Times of invocations on a GPU, which the host does not wait for."""

from __future__ import annotations

import pytest
import torch

from ray_moe.dataplane.adaptive import DeviceStopwatch, stopwatch_on

pytestmark = pytest.mark.gpu


def test_events_time_what_the_device_does_while_the_host_goes_on() -> None:
    watch = stopwatch_on(torch.device("cuda"))
    assert isinstance(watch, DeviceStopwatch)
    assert watch.micros() is None
    torch.cuda._sleep(1_000)  # whatever is made at first use
    torch.cuda.synchronize()
    watch.start()
    torch.cuda._sleep(400_000_000)  # some 200 ms
    watch.stop()
    assert watch.micros() is None, "the device is not there yet"
    torch.cuda.synchronize()
    slept = watch.micros()
    assert slept is not None and slept > 20_000
    watch.start()
    torch.cuda._sleep(1_000)
    watch.stop()
    torch.cuda.synchronize()
    short = watch.micros()
    assert short is not None and short < slept
    watch.start()
    assert watch.micros() is None, "what was not stopped has no time"


def test_a_time_is_of_its_own_stream() -> None:
    watch, beside = stopwatch_on(torch.device("cuda")), torch.cuda.Stream()
    with torch.cuda.stream(beside):
        torch.cuda._sleep(400_000_000)
    watch.start()
    watch.stop()
    torch.cuda.current_stream().synchronize()
    alone = watch.micros()
    assert alone is not None and alone < 20_000
    torch.cuda.synchronize()
