"""Requests between two engines: the same tokens as undisturbed, with their KV and without, at any step boundary."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ray_moe.dataplane.layer import Invocation
from ray_moe.engine.handover import Departing, take_in, take_out, worth_moving
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.request import Request
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Scheduler
from ray_moe.engine.trunk import Binding
from ray_moe.engine.units import Emission, StepPlan, UnitBatch
from ray_moe.errors import ConfigError, RequestError
from ray_moe.routes import Routes
from tests.one_peer import OnePeer
from tests.unit.test_scheduler import check_plan, expected_emissions, make_request, make_scheduler, next_token


def always(positions: int, kv_bytes: int) -> bool:
    assert positions > 0 and kv_bytes > 0
    return True


def never(positions: int, kv_bytes: int) -> bool:
    return False


@dataclass
class Engine:
    """The loop's order of calls without its thread: plans `look_ahead` steps before it runs one."""

    scheduler: Scheduler
    cache: KVCache
    forward: Callable[[KVCache, UnitBatch], list[int]]
    look_ahead: int = 1
    steps: int = 0
    emissions: list[Emission] = field(default_factory=list)
    plans: deque[StepPlan] = field(default_factory=deque)

    def plan(self) -> None:
        self.plans.append(self.scheduler.plan(self.steps))
        self.steps += 1

    def step(self) -> None:
        """A step of the loop, up to the next boundary: there, `look_ahead` steps are planned and have not run."""
        while len(self.plans) <= self.look_ahead:
            self.plan()
        plan = self.plans.popleft()
        check_plan(self.scheduler, plan)
        for unit in plan.units:
            batch = self.scheduler.materialise(unit)
            if batch is not None:
                self.emissions += self.scheduler.commit(unit, batch, self.forward(self.cache, batch))

    def run_dry(self) -> None:
        bound = self.steps + 3000
        while self.scheduler.has_work:
            assert self.steps < bound, f"{self.scheduler.counts} after 3000 steps"
            self.step()


def across(departing: Departing) -> Departing:
    """As another process receives it."""
    received: Departing = pickle.loads(pickle.dumps(departing))
    return received


# ---- a toy whose next token is a hash of the KV it reads ----


def toy_forward(cache: KVCache, batch: UnitBatch) -> list[int]:
    """Keys hold token ids and values hold positions, so that a wrong, lost or shared entry changes the stream."""
    token_T, position_T = batch.input_ids[0].double(), batch.position_ids[0].double()
    pool = cache.write(0, batch.write_slots, token_T[None, :, None], position_T[None, :, None])
    bounds = batch.cu_q.tolist()
    row_of = {end - 1: row for row, end in enumerate(bounds[1:])}
    tokens = []
    for packed in batch.sample_rows.tolist():
        row = row_of[packed]
        seen_N = torch.arange(int(batch.kv_len[row]))
        blocks_W = batch.block_table[row]
        entries_N2 = pool[blocks_W[seen_N // cache.block_size] * cache.block_size + seen_N % cache.block_size][:, 0]
        assert entries_N2[:, 1].tolist() == seen_N.tolist()
        tokens.append(next_token(entries_N2[:, 0].long().tolist()))
    return tokens


def toy_engine(look_ahead: int = 1, **sizes: int) -> Engine:
    scheduler = make_scheduler(**sizes)
    return Engine(scheduler, KVCache(scheduler.total_blocks, scheduler.limits.block_size), toy_forward, look_ahead)


@dataclass(frozen=True)
class Move:
    step: int
    source: int
    only: int | None  # one request, or all
    with_kv: bool
    delay: int  # boundaries that it spends between the two engines


moves = st.builds(
    Move,
    step=st.integers(2, 16),
    source=st.integers(0, 1),
    only=st.none() | st.integers(0, 2),
    with_kv=st.booleans(),
    delay=st.integers(0, 3),
)
# step, prompt tokens, max_tokens, prefix tokens, engine
arrivals = st.tuples(st.integers(0, 6), st.integers(1, 24), st.integers(6, 20), st.integers(0, 3), st.integers(0, 1))


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(
    wanted=st.lists(arrivals, min_size=1, max_size=6),
    hand_overs=st.lists(moves, min_size=2, max_size=10),
    block_sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    spare_blocks=st.integers(0, 8),
    max_prefill_tokens=st.integers(1, 24),
    max_decode_rows=st.integers(1, 4),
    look_ahead=st.sampled_from([1, 1, 1, 0, 2]),
)
def test_requests_handed_back_and_forth_get_exactly_the_tokens_of_undisturbed_ones(
    wanted: list[tuple[int, int, int, int, int]],
    hand_overs: list[Move],
    block_sizes: tuple[int, int],
    spare_blocks: int,
    max_prefill_tokens: int,
    max_decode_rows: int,
    look_ahead: int,
) -> None:
    requests = [
        make_request(f"r{place}", prompt, most, prefix) for place, (_, prompt, most, prefix, _) in enumerate(wanted)
    ]
    engines = [
        toy_engine(
            look_ahead,
            block_size=size,
            num_blocks=max(-(-request.positions // size) for request in requests) + spare_blocks,
            max_prefill_tokens=max_prefill_tokens,
            max_decode_rows=max_decode_rows,
        )
        for size in block_sizes
    ]
    under_way: list[tuple[int, int, Departing]] = []  # arrives at step, at engine
    with_kv = resumed = 0
    for now in range(36):
        for request, (step, _, _, _, engine) in zip(requests, wanted, strict=True):
            if step == now:
                engines[engine].scheduler.submit(request)
        for move in hand_overs:
            if move.step == now:
                source = engines[move.source]
                ids = None if move.only is None else [f"r{move.only}"]
                left = take_out(source.scheduler, source.cache, ids, always if move.with_kv else never)
                under_way += [(now + move.delay, 1 - move.source, across(departing)) for departing in left]
                with_kv += sum(departing.kv is not None for departing in left)
                assert move.only is not None or not source.scheduler.has_work
        for due in [item for item in under_way if item[0] == now]:
            under_way.remove(due)
            resumed += take_in(engines[due[1]].scheduler, engines[due[1]].cache, due[2])
        for engine in engines:
            engine.step()
    assert not under_way
    for engine in engines:
        engine.run_dry()

    event(f"some KV went along: {with_kv > 0}; was used: {resumed > 0}")
    emitted = sorted((e for engine in engines for e in engine.emissions), key=lambda e: (e.request_id, e.index))
    assert emitted == [emission for request in requests for emission in expected_emissions(request)]
    for engine in engines:
        assert engine.scheduler.free_blocks == engine.scheduler.total_blocks


def test_a_request_in_decode_goes_on_with_one_decode_row_and_no_prefill() -> None:
    here, there = toy_engine(), toy_engine()
    request = make_request("a", prompt=9, max_tokens=12, eos=frozenset())
    here.scheduler.submit(request)
    for _ in range(4):
        here.step()
    (departing,) = take_out(here.scheduler, here.cache, ["a", "unknown"], always)
    assert (departing.positions, len(departing.request.prefix_ids)) == (12, 4)
    assert departing.nbytes == 12 * 16
    assert take_in(there.scheduler, there.cache, departing)
    assert there.scheduler.outstanding_tokens == request.positions - 12
    there.plan()
    plan = there.plans[0]
    assert plan.prefill is None
    assert plan.decode is not None
    assert [(row.start, row.count, row.index) for row in plan.decode.rows] == [(12, 1, 4)]
    there.run_dry()
    assert here.emissions + there.emissions == expected_emissions(request)


def test_a_prompt_half_way_through_its_chunks_computes_only_the_rest() -> None:
    here, there = toy_engine(max_prefill_tokens=4), toy_engine(max_prefill_tokens=6)
    request = make_request("a", prompt=15, max_tokens=3, eos=frozenset())
    here.scheduler.submit(request)
    for _ in range(2):
        here.step()
    (departing,) = take_out(here.scheduler, here.cache, None, always)
    assert departing.positions == 8  # a third chunk is planned and never runs
    assert take_in(there.scheduler, there.cache, departing)
    there.plan()
    assert there.plans[0].prefill is not None
    assert [(row.start, row.count, row.samples) for row in there.plans[0].prefill.rows] == [(8, 6, False)]
    there.run_dry()
    assert there.emissions == expected_emissions(request)


def test_kv_stays_behind_where_it_is_not_worth_moving_or_there_is_none() -> None:
    here = toy_engine(max_decode_rows=1)
    for name in ("runs", "waits"):
        here.scheduler.submit(make_request(name, prompt=6, max_tokens=8, eos=frozenset()))
    here.step()
    asked: list[tuple[int, int]] = []

    def decide(positions: int, kv_bytes: int) -> bool:
        asked.append((positions, kv_bytes))
        return False

    departed = take_out(here.scheduler, here.cache, None, decide)
    assert [(departing.request_id, departing.positions, departing.kv) for departing in departed] == [
        ("runs", 0, None),
        ("waits", 0, None),
    ]
    assert asked == [(6, 6 * 16)]
    assert not here.scheduler.has_work


def test_a_request_that_can_never_run_here_or_runs_already_is_refused_and_nothing_is_taken() -> None:
    here, there = toy_engine(), toy_engine(num_blocks=3)
    here.scheduler.submit(make_request("long", prompt=10, max_tokens=8, eos=frozenset()))
    here.scheduler.submit(make_request("a", prompt=3, max_tokens=4, eos=frozenset()))
    for _ in range(3):
        here.step()
    long, short = take_out(here.scheduler, here.cache, None, always)
    with pytest.raises(RequestError, match="need 5 KV blocks of 4 tokens; there are 3"):
        take_in(there.scheduler, there.cache, long)
    assert take_in(there.scheduler, there.cache, short)
    free = there.scheduler.free_blocks
    with pytest.raises(RequestError, match="'a' is open already"):
        take_in(there.scheduler, there.cache, short)
    assert there.scheduler.request_ids == ("a",)
    assert there.scheduler.free_blocks == free
    assert take_in(here.scheduler, here.cache, long), "its first engine can go on with it, too"


def test_kv_of_another_model_is_refused_before_anything_is_taken() -> None:
    here, there = toy_engine(), toy_engine()
    there.scheduler.submit(make_request("other", prompt=3, max_tokens=4, eos=frozenset()))
    there.step()
    here.scheduler.submit(make_request("a", prompt=3, max_tokens=4, eos=frozenset()))
    here.step()
    (departing,) = take_out(here.scheduler, here.cache, None, always)
    assert departing.kv is not None
    other = Departing(departing.request, departing.positions, {0: departing.kv[0].float()})
    with pytest.raises(RequestError, match=r"torch.float32 came; .* torch.float64"):
        take_in(there.scheduler, there.cache, other)
    assert there.scheduler.request_ids == ("other",)


def test_kv_that_is_not_of_so_many_positions_is_refused_by_both_numbers() -> None:
    request = make_request("a", prompt=5, max_tokens=4)
    for positions, kv, found in [(3, None, 0), (3, {0: torch.zeros(4, 1, 2)}, 4), (0, {0: torch.zeros(2, 1, 2)}, 2)]:
        with pytest.raises(RequestError, match=rf"KV of \[{found}\] positions and says {positions}"):
            Departing(request, positions, kv)


@pytest.mark.parametrize(
    ("positions", "kv_bytes", "moves"),
    [(1000, 10_000_000, True), (1000, 100_000_000, False), (0, 0, False), (1, 10_000, True)],
)
def test_kv_is_moved_when_that_is_quicker_than_to_compute_it_again(positions: int, kv_bytes: int, moves: bool) -> None:
    # 50 MB/s against 2000 tokens/s: a position may weigh 25 kB.
    assert worth_moving(positions, kv_bytes, bytes_per_second=5e7, prefill_tokens_per_second=2e3) is moves


@pytest.mark.parametrize(("wire", "prefill"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, -2.0)])
def test_a_rate_that_is_not_positive_is_refused(wire: float, prefill: float) -> None:
    with pytest.raises(ConfigError, match="both must be > 0"):
        worth_moving(1, 1, bytes_per_second=wire, prefill_tokens_per_second=prefill)


# ---- a real trunk: two caches and two schedulers beside one copy of the weights ----

PROMPTS = {f"p{length}": tuple(1 + (7 * i + length) % 250 for i in range(length)) for length in (5, 40, 90)}


def served_trunk(peer: OnePeer) -> None:
    """Bind the peer's slots to its trunk, for whoever calls it without the peer's own loop."""

    def bound(layer: int, _module: nn.Module) -> Binding:
        def run(hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
            routes = Routes(topk_ids_TK, topk_weights_TK)
            return peer.loop.view.layers[layer].forward(hidden_TD, routes, Invocation(0, "prefill"))

        return run

    peer.trunk.bind(bound)


@torch.inference_mode()
def trunk_forward(peer: OnePeer, cache: KVCache, batch: UnitBatch) -> list[int]:
    output = peer.trunk.model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.sample_rows,
        ray_moe=cache.bind(batch),
    )
    logits: Tensor = output.logits[0]
    tokens: list[int] = batch.sampling.sample(logits).tolist()
    return tokens


def trunk_engine(peer: OnePeer, block_size: int, max_prefill_tokens: int) -> Engine:
    num_blocks = 512 // block_size
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_prefill_tokens=max_prefill_tokens,
        max_decode_rows=8,
        max_positions=peer.trunk.max_positions,
        vocab_size=peer.trunk.vocab_size,
    )
    return Engine(scheduler, KVCache(num_blocks, block_size), partial(trunk_forward, peer))


def stream(emissions: list[Emission], name: str) -> list[tuple[int, int]]:
    return [(emission.index, emission.token_id) for emission in emissions if emission.request_id == name]


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_real_models_streams_go_on_exactly_with_kv_and_by_replay(
    family_dir: Callable[..., Path], family: str, temperature: float
) -> None:
    peer = OnePeer(family_dir(family))
    served_trunk(peer)
    # Past gpt_oss's window of 32 positions; the 90 tokens of p90 take four chunks.
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=5, ignore_eos=True)

    def submitted(engine: Engine) -> Engine:
        for name, prompt in PROMPTS.items():
            engine.scheduler.submit(Request(name, prompt, params))
        return engine

    undisturbed = submitted(trunk_engine(peer, 16, 32))
    undisturbed.run_dry()
    for decide in (always, never):
        for boundary in (1, 3, 8):  # inside p40's prompt, inside p90's, and while all decode
            here, there = submitted(trunk_engine(peer, 16, 32)), trunk_engine(peer, 8, 24)
            there.scheduler.submit(Request("own", PROMPTS["p40"], params))
            for _ in range(boundary):
                here.step()
                there.step()
            used = [
                take_in(there.scheduler, there.cache, across(departing))
                for departing in take_out(here.scheduler, here.cache, None, decide)
            ]
            assert any(used) is (decide is always)
            here.run_dry()
            there.run_dry()
            for name in PROMPTS:
                assert stream(here.emissions + there.emissions, name) == stream(undisturbed.emissions, name)
            assert [token for _, token in stream(there.emissions, "own")] == [
                token for _, token in stream(undisturbed.emissions, "p40")
            ]


def test_two_running_loops_hand_their_requests_over_at_a_step_boundary(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=3, ignore_eos=True)
    with OnePeer(folder) as here, OnePeer(folder) as there:
        for name, prompt in PROMPTS.items():
            there.loop.submit(Request(f"whole-{name}", prompt, params))
        there.outlet.until_ended(*(f"whole-{name}" for name in PROMPTS))

        for name, prompt in PROMPTS.items():
            here.loop.submit(Request(name, prompt, params))
        with here.outlet.delivered:
            assert here.outlet.delivered.wait_for(lambda: len(here.outlet.tokens("p90")) >= 10, timeout=60)

        def leave() -> None:
            for departing in take_out(here.loop.scheduler, here.loop.cache, None, always):
                there.loop.post(partial(take_in, there.loop.scheduler, there.loop.cache, across(departing)))

        here.loop.post(leave)
        there.outlet.until_ended(*PROMPTS)
    assert here.raised is None and there.raised is None
    for name in PROMPTS:
        first, second = here.outlet.tokens(name), there.outlet.tokens(name)
        assert len(first) >= 10 and second
        assert first + second == there.outlet.tokens(f"whole-{name}")
    assert here.loop.load.kv_blocks_used == 0
