"""The scheduler with a toy model whose KV is real: it stores token ids in slots and reads them through block tables.

The toy's next token is a hash of every token before it, so that one wrong, lost, stale or shared KV entry changes the
stream. The oracle is the same hash over a plain list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ray_moe.engine.request import TRANSITIONS, FinishReason, Request, RequestEvent, RequestState, advance
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Counts, Scheduler
from ray_moe.engine.units import Emission, StepPlan, UnitBatch
from ray_moe.errors import ConfigError, RayMoEError, RequestError

VOCAB = 61
EOS = 7


def next_token(tokens: list[int]) -> int:
    return int.from_bytes(blake2b(bytes(tokens), digest_size=8).digest(), "big") % VOCAB


def expected_emissions(request: Request) -> list[Emission]:
    """What the request emits when it has the engine to itself and nothing ever goes wrong."""
    tokens = [*request.prompt_ids, *request.prefix_ids]
    emissions: list[Emission] = []
    while not emissions or emissions[-1].finish_reason is None:
        tokens.append(next_token(tokens))
        index = len(tokens) - 1 - len(request.prompt_ids)
        reason: FinishReason | None = None
        if index + 1 == request.params.max_tokens:
            reason = "length"
        if tokens[-1] in request.eos_ids:
            reason = "stop"
        emissions.append(Emission(request.request_id, index, tokens[-1], reason))
    return emissions


def make_request(
    name: str, prompt: int, max_tokens: int, prefix: int = 0, eos: frozenset[int] = frozenset({EOS})
) -> Request:
    """A greedy request; its prefix is what an earlier submission would have delivered (at least one token is left)."""
    prompt_ids = tuple(next_token([len(name), *name.encode(), position]) for position in range(prompt))
    whole = Request(name, prompt_ids, SamplingParams(max_tokens=max_tokens, temperature=0), eos_ids=eos)
    delivered = [emission.token_id for emission in expected_emissions(whole)][:-1]
    return Request(name, prompt_ids, whole.params, tuple(delivered[:prefix]), eos)


class ToyModel:
    """KV slot -> (position, token)."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, tuple[int, int]] = {}

    def forward(self, batch: UnitBatch) -> list[int]:
        ids, positions = batch.input_ids[0].tolist(), batch.position_ids[0].tolist()
        for slot, position, token in zip(batch.write_slots.tolist(), positions, ids, strict=True):
            self.slots[slot] = (position, token)
        bounds = batch.cu_q.tolist()
        last_token_of = {end - 1: row for row, end in enumerate(bounds[1:])}
        return [next_token(self.read(batch, last_token_of[packed])) for packed in batch.sample_rows.tolist()]

    def read(self, batch: UnitBatch, row: int) -> list[int]:
        table = batch.block_table[row].tolist()
        tokens = []
        for position in range(int(batch.kv_len[row])):
            stored, token = self.slots[
                table[position // self.block_size] * self.block_size + position % self.block_size
            ]
            assert stored == position
            tokens.append(token)
        return tokens


@dataclass
class Driver:
    """Plans `look_ahead` steps before it runs one, and forwards each unit twice, as a retry would."""

    scheduler: Scheduler
    look_ahead: int = 1
    steps: int = 0
    emissions: list[Emission] = field(default_factory=list)
    plans: deque[StepPlan] = field(default_factory=deque)
    before_commit: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.model = ToyModel(self.scheduler.limits.block_size)

    def step(self) -> StepPlan:
        while len(self.plans) <= self.look_ahead:
            self.plans.append(self.scheduler.plan(self.steps))
            self.steps += 1
        plan = self.plans.popleft()
        check_plan(self.scheduler, plan)
        for unit in plan.units:
            batch = self.scheduler.materialise(unit)
            if batch is not None:
                tokens = self.model.forward(batch)
                assert self.model.forward(batch) == tokens
                self.before_commit()
                self.emissions += self.scheduler.commit(unit, batch, tokens)
        return plan

    def run_dry(self, bound: int = 5000) -> None:
        while self.scheduler.has_work:
            assert self.steps < bound, f"{self.scheduler.counts} after {bound} steps"
            self.step()

    def stream(self, name: str) -> list[Emission]:
        return [emission for emission in self.emissions if emission.request_id == name]


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    rows = [row for unit in plan.units for row in unit.rows]
    assert len({row.request_id for row in rows}) == len(rows), "a request is in one unit of a step at most"
    blocks = [block for row in rows for block in row.blocks]
    assert len(set(blocks)) == len(blocks), "no two requests of a step share a block"
    if plan.prefill is not None:
        assert plan.prefill.kind == "prefill"
        assert 1 <= plan.prefill.num_tokens <= scheduler.max_prefill_tokens
        assert len(plan.prefill.rows) <= scheduler.max_decode_rows
    if plan.decode is not None:
        assert plan.decode.kind == "decode"
        assert len(plan.decode.rows) <= scheduler.max_decode_rows
        assert all(row.count == 1 and row.samples for row in plan.decode.rows)


def make_scheduler(**changes: int) -> Scheduler:
    sizes = {
        "num_blocks": 64,
        "block_size": 4,
        "max_prefill_tokens": 16,
        "max_decode_rows": 8,
        "max_positions": 200,
        "vocab_size": VOCAB,
    }
    return Scheduler(**(sizes | changes))  # type: ignore[arg-type]


# ---- the whole contract at once ----


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: int
    max_tokens: int
    prefix: int
    cancel_step: int | None
    cancel_late: bool  # after materialise, before commit


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 15),
    prompt=st.integers(1, 24),
    max_tokens=st.integers(1, 16),
    prefix=st.integers(0, 6),
    cancel_step=st.none() | st.integers(0, 30),
    cancel_late=st.booleans(),
)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    arrivals=st.lists(arrivals, min_size=1, max_size=8),
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 6),
    max_prefill_tokens=st.integers(1, 24),
    max_decode_rows=st.integers(1, 5),
    look_ahead=st.sampled_from([1, 1, 1, 0, 2]),
)
def test_every_request_gets_its_own_tokens_whatever_happens_to_the_others(
    arrivals: list[Arrival],
    block_size: int,
    spare_blocks: int,
    max_prefill_tokens: int,
    max_decode_rows: int,
    look_ahead: int,
) -> None:
    names = {f"r{number}": arrival for number, arrival in enumerate(arrivals)}
    requests = {name: make_request(name, a.prompt, a.max_tokens, a.prefix) for name, a in names.items()}
    largest = max(-(-request.positions // block_size) for request in requests.values())
    scheduler = make_scheduler(
        num_blocks=largest + spare_blocks,
        block_size=block_size,
        max_prefill_tokens=max_prefill_tokens,
        max_decode_rows=max_decode_rows,
    )
    driver = Driver(scheduler, look_ahead)
    cancelled: dict[str, int] = {}  # name -> emissions at the cancel

    def cancel_due(now: int, late: bool) -> None:
        for name, arrival in names.items():
            if arrival.cancel_step == now and arrival.cancel_late == late and scheduler.cancel(name):
                cancelled[name] = len(driver.stream(name))

    for now in range(31):
        for name, arrival in names.items():
            if arrival.step == now:
                scheduler.submit(requests[name])
        cancel_due(now, late=False)
        driver.before_commit = lambda now=now: cancel_due(now, late=True)  # type: ignore[misc]
        driver.step()
    driver.before_commit = lambda: None
    driver.run_dry()

    event(f"preempted: {scheduler.preemptions > 0}")
    assert scheduler.free_blocks == scheduler.total_blocks
    for name, request in requests.items():
        whole = expected_emissions(request)
        assert driver.stream(name) == (whole[: cancelled[name]] if name in cancelled else whole)


# ---- one rule at a time ----


def test_every_edge_of_the_state_table_and_no_other_can_be_taken() -> None:
    assert len(TRANSITIONS) == 14
    for state in RequestState:
        for happening in RequestEvent:
            if (state, happening) in TRANSITIONS:
                assert advance(state, happening) is TRANSITIONS[state, happening]
            else:
                with pytest.raises(RayMoEError, match=f"{state.value}.*{happening.value}"):
                    advance(state, happening)


def test_a_step_is_planned_before_the_tokens_of_the_step_before_it_are_known() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", prompt=5, max_tokens=9, eos=frozenset()))
    first, second = scheduler.plan(0), scheduler.plan(1)
    assert first.prefill is not None
    assert second.decode is not None
    assert (second.decode.rows[0].start, second.decode.rows[0].index) == (5, 1)
    with pytest.raises(RayMoEError, match="needs 6 tokens and 5 are known"):
        scheduler.materialise(second.decode)
    batch = scheduler.materialise(first.prefill)
    assert scheduler.commit(first.prefill, batch, [42]) == [Emission("a", 0, 42, None)]
    following = scheduler.materialise(second.decode)
    assert following is not None
    assert following.input_ids.tolist() == [[42]]
    assert following.position_ids.tolist() == [[5]]


def test_a_request_that_ends_by_max_tokens_is_not_planned_again_and_lends_its_blocks() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    scheduler.submit(make_request("a", prompt=4, max_tokens=2, eos=frozenset()))
    scheduler.submit(make_request("b", prompt=8, max_tokens=1, eos=frozenset()))
    driver = Driver(scheduler)
    plans = [driver.step() for _ in range(3)]
    assert [[row.request_id for unit in plan.units for row in unit.rows] for plan in plans] == [["a"], ["a"], ["b"]]
    assert scheduler.preemptions == 0
    assert driver.emissions == [
        *expected_emissions(make_request("a", prompt=4, max_tokens=2, eos=frozenset())),
        *expected_emissions(make_request("b", prompt=8, max_tokens=1, eos=frozenset())),
    ]


def test_a_row_planned_past_an_end_of_sequence_is_masked() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.submit(make_request(name, prompt=3, max_tokens=9))
    first, second = scheduler.plan(0), scheduler.plan(1)
    assert first.prefill is not None
    assert second.decode is not None
    emissions = scheduler.commit(first.prefill, scheduler.materialise(first.prefill), [EOS, 5])
    assert [emission.finish_reason for emission in emissions] == ["stop", None]
    batch = scheduler.materialise(second.decode)
    assert batch is not None
    assert batch.request_ids == ("b",)
    assert scheduler.commit(second.decode, batch, [6]) == [Emission("b", 1, 6, None)]


def test_ignore_eos_generates_past_it() -> None:
    scheduler = make_scheduler()
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    scheduler.submit(Request("a", (1, 2), params, eos_ids=frozenset({EOS})))
    unit = scheduler.plan(0).prefill
    assert unit is not None
    assert scheduler.commit(unit, scheduler.materialise(unit), [EOS]) == [Emission("a", 0, EOS, None)]


def test_cancel_frees_the_blocks_at_once_and_masks_what_has_not_run() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", prompt=9, max_tokens=5))
    unit = scheduler.plan(0).prefill
    assert unit is not None
    assert scheduler.free_blocks < scheduler.total_blocks
    assert scheduler.cancel("a")
    assert not scheduler.cancel("a")
    assert scheduler.free_blocks == scheduler.total_blocks
    assert scheduler.materialise(unit) is None
    assert scheduler.commit(unit, None, []) == []
    assert not scheduler.has_work


def test_an_id_used_again_after_a_cancel_does_not_meet_its_old_rows() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", prompt=4, max_tokens=5))
    unit = scheduler.plan(0).prefill
    assert unit is not None
    batch = scheduler.materialise(unit)
    scheduler.cancel("a")
    scheduler.submit(make_request("a", prompt=6, max_tokens=5))
    assert scheduler.commit(unit, batch, [3]) == []
    assert scheduler.materialise(unit) is None
    driver = Driver(scheduler, steps=1)
    driver.run_dry()
    assert driver.emissions == expected_emissions(make_request("a", prompt=6, max_tokens=5))


def test_a_preempted_request_keeps_the_token_of_the_step_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    old, young = (make_request(name, prompt=3, max_tokens=6, eos=frozenset()) for name in ("old", "young"))
    scheduler.submit(old)
    scheduler.submit(young)
    driver = Driver(scheduler, look_ahead=0)
    driver.step()
    in_flight = scheduler.plan(1)  # both decode at position 3; the next position needs a block that is not there
    assert in_flight.decode is not None
    after = scheduler.plan(2)
    assert (scheduler.preemptions, scheduler.counts) == (1, Counts(waiting=1, running=1))
    assert after.decode is not None
    assert [row.request_id for row in after.decode.rows] == ["old"]
    batch = scheduler.materialise(in_flight.decode)
    assert batch is not None
    assert batch.request_ids == ("old", "young")
    driver.emissions += scheduler.commit(in_flight.decode, batch, driver.model.forward(batch))
    assert driver.stream("young") == expected_emissions(young)[:2]
    assert scheduler.outstanding_tokens == (8 - 4) + 8  # old has the KV of 4 of its 8 positions, young of none
    driver.plans.append(after)
    driver.steps = 3
    driver.run_dry()
    assert driver.stream("old") == expected_emissions(old)
    assert driver.stream("young") == expected_emissions(young)


def test_decodes_go_first_and_prompts_share_the_prefill_budget_in_order() -> None:
    scheduler = make_scheduler(max_prefill_tokens=10)
    for name, prompt in (("a", 4), ("b", 9), ("c", 2)):
        scheduler.submit(make_request(name, prompt, max_tokens=9, eos=frozenset()))
    first, second = scheduler.plan(0), scheduler.plan(1)
    assert first.prefill is not None
    assert first.decode is None
    assert [(row.request_id, row.start, row.count, row.samples) for row in first.prefill.rows] == [
        ("a", 0, 4, True),
        ("b", 0, 6, False),
    ]
    assert second.prefill is not None
    assert second.decode is not None
    assert [(row.request_id, row.start, row.count, row.samples) for row in second.prefill.rows] == [
        ("b", 6, 3, True),
        ("c", 0, 2, True),
    ]
    assert [row.request_id for row in second.decode.rows] == ["a"]


def test_a_preempted_request_comes_back_before_the_ones_that_came_later() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    for name in ("a", "b", "c"):
        scheduler.submit(make_request(name, prompt=3, max_tokens=6, eos=frozenset()))
    driver = Driver(scheduler)
    driver.run_dry()
    assert scheduler.preemptions > 0
    finished = [emission.request_id for emission in driver.emissions if emission.finish_reason]
    assert finished == ["a", "b", "c"]


def test_a_long_request_among_a_stream_of_short_ones_finishes() -> None:
    scheduler = make_scheduler(num_blocks=12, block_size=4, max_decode_rows=4)
    driver = Driver(scheduler)
    long = make_request("long", prompt=20, max_tokens=24, eos=frozenset())
    for number in range(120):
        scheduler.submit(make_request(f"s{number}", prompt=7, max_tokens=6, eos=frozenset()))
        if number == 10:
            scheduler.submit(long)
        driver.step()
        if driver.stream("long") == expected_emissions(long):
            break
    else:
        pytest.fail(f"{len(driver.stream('long'))} of 24 tokens after 120 steps")


def test_a_failing_engine_can_name_its_requests_and_another_one_continues_them() -> None:
    requests = [make_request(name, prompt=6, max_tokens=12, eos=frozenset()) for name in ("a", "b", "c")]
    first = Driver(make_scheduler(max_decode_rows=2))
    for request in requests:
        first.scheduler.submit(request)
    for _ in range(4):
        first.step()
    moved = first.scheduler.requests()
    assert [len(request.prefix_ids) for request in moved] == [4, 4, 0]
    assert first.scheduler.drain() == ("a", "b", "c")
    assert not first.scheduler.has_work
    assert first.scheduler.free_blocks == first.scheduler.total_blocks

    second = Driver(make_scheduler())
    for request in moved:
        second.scheduler.submit(request)
    second.run_dry()
    for request in requests:
        assert first.stream(request.request_id) + second.stream(request.request_id) == expected_emissions(request)


def running_scheduler(**changes: int) -> Driver:
    """One that runs `a` and `b`, and has planned their next step."""
    driver = Driver(make_scheduler(**changes))
    for name in ("a", "b"):
        driver.scheduler.submit(make_request(name, prompt=5, max_tokens=9, eos=frozenset()))
    for _ in range(3):
        driver.step()
    driver.plans.append(driver.scheduler.plan(driver.steps))
    driver.steps += 1
    return driver


def test_a_request_handed_over_leaves_its_planned_rows_undone_and_its_blocks_free() -> None:
    driver = running_scheduler()
    scheduler = driver.scheduler
    residence = scheduler.hand_over("a")
    assert residence is not None
    assert scheduler.hand_over("a") is None
    whole = expected_emissions(make_request("a", prompt=5, max_tokens=9, eos=frozenset()))
    assert residence.request.prefix_ids == tuple(emission.token_id for emission in whole[:3])
    assert (residence.positions, len(residence.blocks)) == (7, 3)
    driver.run_dry()
    assert driver.stream("a") == whole[:3]
    assert driver.stream("b") == expected_emissions(make_request("b", prompt=5, max_tokens=9, eos=frozenset()))
    assert scheduler.free_blocks == scheduler.total_blocks


def test_an_adopted_request_with_kv_is_the_youngest_that_runs() -> None:
    driver = running_scheduler(num_blocks=9)
    scheduler = driver.scheduler
    scheduler.submit(make_request("waits", prompt=30, max_tokens=3, eos=frozenset()))
    driver.plans.append(scheduler.plan(driver.steps))
    driver.steps += 1
    assert scheduler.counts == Counts(waiting=1, running=2)
    adopted = make_request("adopted", prompt=4, max_tokens=9, prefix=2, eos=frozenset())
    assert len(scheduler.adopt(adopted, 5)) == 2
    assert scheduler.counts == Counts(waiting=1, running=3)
    plan = scheduler.plan(driver.steps)
    assert plan.decode is not None
    assert [(row.request_id, row.start, row.index) for row in plan.decode.rows][-1] == ("adopted", 5, 2)
    assert plan.prefill is None


def test_an_adopted_request_that_finds_no_room_waits_behind_begun_streams_and_before_new_ones() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_decode_rows=2)
    for name in ("a", "b"):
        scheduler.submit(make_request(name, prompt=3, max_tokens=6, eos=frozenset()))
    driver = Driver(scheduler, look_ahead=0)
    driver.step()
    for step in (1, 2):
        driver.plans.append(scheduler.plan(step))
    driver.steps = 3
    assert scheduler.preemptions == 1  # b heads the queue
    scheduler.submit(make_request("new", prompt=3, max_tokens=6, eos=frozenset()))
    begun = make_request("begun", prompt=4, max_tokens=5, prefix=2, eos=frozenset())
    fresh = make_request("fresh", prompt=3, max_tokens=5, eos=frozenset())
    assert scheduler.adopt(begun, 5) == ()  # its KV needs four blocks
    assert scheduler.adopt(fresh, 0) == ()
    driver.run_dry()
    finished = [emission.request_id for emission in driver.emissions if emission.finish_reason]
    assert finished == ["a", "b", "begun", "new", "fresh"]
    assert driver.stream("begun") == expected_emissions(begun)


@pytest.mark.parametrize(("positions", "bound"), [(-1, "-1"), (6, "6 positions came with 6 tokens")])
def test_adopted_kv_leaves_the_last_token_to_compute(positions: int, bound: str) -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match=bound):
        scheduler.adopt(make_request("a", prompt=4, max_tokens=9, prefix=2, eos=frozenset()), positions)
    assert not scheduler.has_work
    assert scheduler.free_blocks == scheduler.total_blocks


def test_an_adopted_request_is_checked_as_a_submitted_one() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    scheduler.submit(make_request("a", prompt=4, max_tokens=3, eos=frozenset()))
    with pytest.raises(RequestError, match="'a' is open already"):
        scheduler.adopt(make_request("a", prompt=4, max_tokens=3, eos=frozenset()), 3)
    with pytest.raises(RequestError, match="need 4 KV blocks of 4 tokens; there are 2"):
        scheduler.adopt(make_request("b", prompt=10, max_tokens=5, eos=frozenset()), 3)
    assert scheduler.request_ids == ("a",)


def test_outstanding_tokens_count_the_positions_still_to_compute() -> None:
    scheduler = make_scheduler(max_prefill_tokens=4)
    scheduler.submit(make_request("a", prompt=6, max_tokens=3, eos=frozenset()))
    found = [scheduler.outstanding_tokens]
    driver = Driver(scheduler, look_ahead=0)
    while scheduler.has_work:
        driver.step()
        found.append(scheduler.outstanding_tokens)
    assert found == [8, 4, 2, 1, 0]


def test_a_commit_that_does_not_fit_its_plan_is_refused_and_changes_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", prompt=5, max_tokens=9, eos=frozenset()))
    first, second = scheduler.plan(0), scheduler.plan(1)
    assert first.prefill is not None
    assert second.decode is not None
    batch = scheduler.materialise(first.prefill)
    with pytest.raises(RayMoEError, match="2 tokens for 1 sampled rows"):
        scheduler.commit(first.prefill, batch, [1, 2])
    with pytest.raises(RayMoEError, match="'a' is open, yet its row did not run"):
        scheduler.commit(first.prefill, None, [])
    scheduler.commit(first.prefill, batch, [1])
    with pytest.raises(RayMoEError, match="given token 0; its next is 1"):
        scheduler.commit(first.prefill, batch, [1])
    assert scheduler.commit(second.decode, scheduler.materialise(second.decode), [2]) == [Emission("a", 1, 2, None)]


def test_what_can_never_be_served_is_refused_by_value_and_bound() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_positions=20)
    greedy = SamplingParams(max_tokens=4, temperature=0)
    scheduler.submit(Request("open", (1,), greedy))
    eos = frozenset({EOS})
    cases = [
        (Request("open", (1,), greedy), "request_id", "'open' is open already"),
        (Request("x", (), greedy), "prompt", "0 tokens; it must have at least 1"),
        (Request("x", (1,) * 17, greedy), "max_tokens", "add up to 21; positions end at 20"),
        (Request("x", (1,) * 14, greedy), "max_tokens", "need 5 KV blocks of 4 tokens; there are 4"),
        (Request("x", (1, VOCAB), greedy), "prompt", f"token id {VOCAB}; ids must be in [0, {VOCAB})"),
        (Request("x", (-1,), greedy), "prompt", "token id -1"),
        (Request("x", (1,), greedy, prefix_ids=(VOCAB,)), "prefix_ids", f"token id {VOCAB}"),
        (Request("x", (1,), greedy, prefix_ids=(1,) * 4), "prefix_ids", "4 tokens; it must have < max_tokens = 4"),
        (Request("x", (1,), greedy, prefix_ids=(EOS,), eos_ids=eos), "prefix_ids", f"end-of-sequence id {EOS}"),
        (Request("x", (1,), SamplingParams(temperature=0.5)), "seed", "seed is None at temperature 0.5"),
    ]
    for request, param, message in cases:
        with pytest.raises(RequestError) as caught:
            scheduler.submit(request)
        assert caught.value.param == param
        assert message in str(caught.value)
    assert [request.request_id for request in scheduler.requests()] == ["open"]
    scheduler.submit(Request("fits", (1,) * 13, greedy))  # 16 positions: the last token is not computed on


@pytest.mark.parametrize(
    "name", ["num_blocks", "block_size", "max_prefill_tokens", "max_decode_rows", "max_positions", "vocab_size"]
)
def test_a_scheduler_without_room_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0|{name} 0"):
        make_scheduler(**{name: 0})


def test_sampling_columns_follow_the_sampled_rows() -> None:
    scheduler = make_scheduler(max_prefill_tokens=9)
    drawing = SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, top_k=5, seed=-3)
    scheduler.submit(Request("a", (1, 2, 3), drawing, prefix_ids=(4, 5)))
    scheduler.submit(make_request("b", prompt=2, max_tokens=4))
    scheduler.submit(make_request("c", prompt=9, max_tokens=4))  # only a chunk of it fits: it samples nothing yet
    unit = scheduler.plan(0).prefill
    assert unit is not None
    batch = scheduler.materialise(unit)
    assert batch is not None
    assert [row.samples for row in batch.rows] == [True, True, False]
    assert batch.sample_rows.tolist() == [4, 6]
    assert batch.cu_q.tolist() == [0, 5, 7, 9]
    assert batch.sampling.temperature_B.tolist() == [0.7, 0.0]
    assert batch.sampling.top_p_B.tolist() == [0.9, 1.0]
    assert batch.sampling.top_k_B.tolist() == [5, 0]
    assert batch.sampling.seed_B.tolist() == [-3, 0]
    assert batch.sampling.index_B.tolist() == [2, 0]
    assert not batch.sampling.all_greedy
