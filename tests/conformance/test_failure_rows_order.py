"""What comes before what (0x06, 0x07, 0x09): rows made against a whole layer, each refused by name, or harmless."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_moe.comm.exchange import Exchange
from ray_moe.comm.solo import SoloGroup
from ray_moe.comm.transports import AllToAllV, CountMatrix
from ray_moe.dataplane import paths
from ray_moe.dataplane.dispatch import SEND, Dispatcher
from ray_moe.dataplane.handle import DispatchHandle
from ray_moe.dataplane.layer import Invocation
from ray_moe.dataplane.rows import ExpertRows, Mode, SegmentedRows
from ray_moe.dataplane.runners import MaskedDecode
from ray_moe.dataplane.schedule import buffers_of, bulk, check_release, list_schedule
from ray_moe.dataplane.strategies import STRATEGIES, Strategy, strategy_named
from ray_moe.engine.blocks import SharedPath
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from ray_moe.errors import (
    CompletionError,
    ScheduleError,
    StageError,
    StaleHandleError,
    UnsupportedModelError,
)
from ray_moe.identity import GlobalRank
from tests.conformance.test_failure_rows_layer import (
    FP32,
    HIDDEN,
    WEIGHTS,
    Doing,
    assert_dense,
    at,
    layer_of,
    unit,
    use,
    watched,
)
from tests.layers import ONE_PEER, spec_of
from tests.one_peer import OnePeer

# -- 0x06


class Impatient(Dispatcher):
    """Hands out the receive buffer's rows without waiting for them."""

    def dispatch_b(self) -> ExpertRows:
        assert self._handle is not None
        offsets = self._handle.expert_offsets_S1
        return SegmentedRows(torch.zeros(offsets[-1], HIDDEN), offsets)


def test_fl_06i_08_a_consumer_before_dispatch_is_complete_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (hidden, routes) = layer_of(), unit()
    with monkeypatch.context() as patched:
        patched.setattr(paths, "Dispatcher", Impatient)
        with pytest.raises(CompletionError, match=r"^missing_dependency: .*grouped came early, expert_input_ready is"):
            layer.forward(hidden, routes, Invocation(0, "bare"))
    assert_dense(layer, hidden, routes)


def test_fl_06i_07_a_layer_whose_runner_takes_the_other_modes_rows_is_refused() -> None:
    class Mistyped(MaskedDecode):
        mode = Mode.NORMAL  # what the path reads, and what the dispatcher gives

    layer, (hidden, routes) = layer_of(runner=Mistyped()), unit()
    with pytest.raises(StageError, match="masked_decode takes low_latency rows, found SegmentedRows of mode normal"):
        layer.forward(hidden, routes, Invocation(0, "bare"))
    use(layer, runner=MaskedDecode())
    assert_dense(layer, hidden, routes)


def test_fl_06i_09_rows_come_home_by_their_handle_when_the_placement_changes_under_it() -> None:
    layer, later, (hidden, routes) = layer_of(at(17)), layer_of(at(18, [(0, 0), (1, 0), (2, 0), (3, 0)])), unit()
    kept = watched(layer)

    def switch() -> None:
        layer.slots, layer.weights, layer.header = later.slots, later.weights, later.header

    use(layer, runner=Doing(switch))
    torch.testing.assert_close(
        layer.forward(hidden, routes, Invocation(0, "bare")), WEIGHTS.dense(hidden, routes), **FP32
    )
    assert (kept[0].header.generation, layer.header.generation) == (17, 18)
    with pytest.raises(StaleHandleError, match=f"dispatch of handle {kept[0].handle_id}: its placement_version is"):
        Dispatcher(layer.header, layer.path.transport).dispatch(hidden, kept[0])


# -- 0x07


def test_fl_07i_08_a_group_that_is_rebuilt_under_an_open_handle_is_refused_at_combine() -> None:
    layer, (hidden, routes) = layer_of(), unit()
    transport: Any = layer.path.transport

    def rebuild() -> None:
        transport.group = SoloGroup(spec_of((0,), epoch=1), GlobalRank(0))

    use(layer, runner=Doing(rebuild))
    stale = r"combine of handle .*: bound to group ep-group-0 epoch 0, the transport runs ep-group-0 epoch 1"
    with pytest.raises(StaleHandleError, match=stale):
        layer.forward(hidden, routes, Invocation(0, "bare"))
    # Nothing can be planned for the new epoch under the old lease either.
    with pytest.raises(StaleHandleError, match=r"dispatch of handle .*: bound to group ep-group-0 epoch 0"):
        layer.forward(hidden, routes, Invocation(1, "bare"))


# -- 0x09


class Recording(AllToAllV):
    """A wire that notes what is submitted, and where the rows lie."""

    def __init__(self) -> None:
        super().__init__(SoloGroup(ONE_PEER, GlobalRank(0)))
        self.seen: list[str] = []
        self.sent_from: list[int] = []

    def dispatch(self, rows_ND: Tensor, counts_PP: CountMatrix) -> Exchange:
        self.seen.append("dispatch")
        self.sent_from.append(rows_ND.data_ptr())
        return super().dispatch(rows_ND, counts_PP)

    def combine(self, rows_RD: Tensor, counts_PP: CountMatrix) -> Exchange:
        self.seen.append("combine")
        return super().combine(rows_RD, counts_PP)


@pytest.mark.parametrize("name", STRATEGIES)
def test_fl_09f_01_a_layer_takes_its_tasks_in_execution_order(name: str) -> None:
    layer, (hidden, routes), wire = layer_of(), unit(), Recording()
    strategy = strategy_named(name)
    use(layer, strategy=strategy, transport=wire, runner=Doing(lambda: wire.seen.append("expert")))
    layer.forward(hidden, routes, Invocation(0, "bare"), lambda: wire.seen.append("shared_path"))
    assert wire.seen == [kind for kind, _ in strategy.order if kind in ("dispatch", "expert", "combine", "shared_path")]


def test_fl_09f_01_an_expert_before_its_dispatch_is_refused_by_the_layer() -> None:
    at_launch = tuple(
        dataclasses.replace(task, predecessors=(*task.predecessors, "expert_0"))
        if task.kind == "dispatch"
        else dataclasses.replace(task, predecessors=("pack_0",))
        if task.kind == "expert"
        else task
        for task in bulk()
    )
    with pytest.raises(ScheduleError, match="no_consumer: buffer receive_0 of dispatch_0"):
        Strategy("at_launch", at_launch)
    # And were such an order taken all the same, the dispatcher would have no rows to give.
    layer, (hidden, routes) = layer_of(), unit()
    hasty = strategy_named("bulk")
    hasty.__dict__["order"] = (("plan", 0), ("pack", 0), ("expert", 0))
    use(layer, strategy=hasty)
    with pytest.raises(StageError, match="dispatch_b is illegal in stage INITIAL"):
        layer.forward(hidden, routes, Invocation(0, "bare"))


class Hasty(Recording):
    """A wire that gives the send buffer back as soon as it has been handed it: rows were packed, after all."""

    def __init__(self, kept: list[DispatchHandle]) -> None:
        super().__init__()
        self._kept = kept

    def dispatch(self, rows_ND: Tensor, counts_PP: CountMatrix) -> Exchange:
        exchange = super().dispatch(rows_ND, counts_PP)
        self._kept[-1].completion.release(SEND)
        return exchange


def test_fl_09f_03_a_send_buffer_released_after_packing_is_refused_by_the_layer() -> None:
    layer, (hidden, routes) = layer_of(), unit()
    kept = watched(layer)
    use(layer, transport=Hasty(kept))
    with pytest.raises(CompletionError, match=r"^released_before_last_reader: .*buffer 'packed_send_payload' has read"):
        layer.forward(hidden, routes, Invocation(0, "bare"))
    # Two chunks in flight never send from one buffer; afterwards the next invocation has both again.
    wire = Recording()
    use(layer, transport=wire, strategy=strategy_named("chunk_pipeline"))
    for step in (1, 2):
        layer.forward(hidden, routes, Invocation(step, "bare"))
    first, second = wire.sent_from[:2], wire.sent_from[2:]
    assert len(set(first)) == 2
    assert set(first) == set(second)


def test_fl_09f_04_a_layers_schedule_lists_the_final_sum_as_reader_of_the_shared_output() -> None:
    layer, (hidden, routes) = layer_of(), unit()
    strategy = strategy_named("shared_path")
    use(layer, strategy=strategy)
    layer.forward(hidden, routes, Invocation(0, "bare"), lambda: None)
    assert strategy.order.index(("shared_path", 0)) < strategy.order.index(("reduce", 0))
    spans = list_schedule(strategy.tasks)
    with pytest.raises(ScheduleError, match="early_release: shared_output is released"):
        check_release(buffers_of(strategy.tasks), spans, {"shared_output": spans["shared_path"].end})
    unread = tuple(
        dataclasses.replace(task, predecessors=("combine_0",)) if task.kind == "reduce" else task
        for task in strategy.tasks
    )
    with pytest.raises(ScheduleError, match="no_consumer: buffer shared_output of shared_path must list its readers"):
        buffers_of(unread)


def tokens_of(peer: OnePeer) -> list[int]:
    peer.loop.submit(Request("r", tuple(range(3, 20)), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)))
    with peer:
        peer.outlet.until_ended("r")
    return peer.outlet.tokens("r")


def test_fl_09f_04_an_engine_whose_shared_output_ends_with_its_producer_is_refused(
    family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = family_dir("deepseek_v3"), SharedPath.run

    def released(self: SharedPath) -> None:
        promised = self._promised
        run(self)
        written = promised or self._computed
        assert written is not None
        written[1].fill_(torch.nan)  # whoever gets the memory next writes into it

    with monkeypatch.context() as patched:
        patched.setattr(SharedPath, "run", released)
        with pytest.raises(UnsupportedModelError, match="model family 'deepseek_v3' cannot be served: its blocks read"):
            OnePeer(folder, strategy="shared_path")
    beside = OnePeer(folder, strategy="shared_path")
    assert tokens_of(beside) == tokens_of(OnePeer(folder))
    assert beside.raised is None
