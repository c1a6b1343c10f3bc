"""What changes logits before a token is taken, against plain Python; and that it follows from the tokens alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.engine.request import Request
from ray_moe.engine.sampling import SamplingParams, choices
from ray_moe.engine.scheduler import Scheduler
from ray_moe.engine.steering import Steering, SteeringColumns, TokenLogprobs, logprobs_of
from ray_moe.engine.units import Emission
from ray_moe.errors import RequestError
from tests.layers import untimed

VOCABULARY = 70  # three words of 32 tokens, the last one with room to spare
TOKENS = st.lists(st.integers(0, 9), max_size=12)


class EvenThenEnd:
    """A grammar for tests: even tokens only, then token 1 once five have come. An odd one breaks it."""

    def begin(self) -> EvenMatcher:
        return EvenMatcher()


class EvenMatcher:
    def __init__(self) -> None:
        self.taken: list[int] = []
        self.failure = ""

    def take(self, tokens: Sequence[int]) -> None:
        self.taken += tokens
        if any(token % 2 for token in tokens):
            self.failure = "odd"

    def fill(self, words_W: np.ndarray) -> None:
        allowed = [1] if len(self.taken) >= 5 or self.failure else range(0, VOCABULARY, 2)
        bits = np.zeros(len(words_W) * 32, dtype=np.uint8)
        bits[list(allowed)] = 1
        words_W[:] = np.packbits(bits, bitorder="little").view(np.int32)


def applied(logits_BV: torch.Tensor, steerings: Sequence[Steering | None]) -> torch.Tensor:
    columns = SteeringColumns.pack(steerings, VOCABULARY, "cpu")
    return logits_BV if columns is None else columns.apply(logits_BV)


@untimed
@given(tokens=TOKENS, presence=st.floats(-2, 2), frequency=st.floats(-2, 2), bias=st.floats(-100, 100))
def test_penalties_and_biases_are_openais_formula(
    tokens: list[int], presence: float, frequency: float, bias: float
) -> None:
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, logit_bias=((3, bias),))
    counts, logits = Counter(tokens), [0.25 * token for token in range(VOCABULARY)]
    expected = [
        logit - counts[token] * frequency - (counts[token] > 0) * presence + (bias if token == 3 else 0.0)
        for token, logit in enumerate(logits)
    ]
    steering = Steering(params, None)
    steering.advance([7, 7, *tokens], 2)  # a prompt is no repetition
    found = applied(torch.tensor([logits]), [steering])[0].tolist()
    assert found == pytest.approx(expected, abs=1e-4)  # fp32 beside float64


@untimed
@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 12), max_size=4))
def test_tokens_in_any_pieces_steer_alike(tokens: list[int], cuts: list[int]) -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    whole, pieces = Steering(params, EvenThenEnd()), Steering(params, EvenThenEnd())
    whole.advance(tokens, 0)
    for cut in sorted(min(cut, len(tokens)) for cut in cuts):
        pieces.advance(tokens[:cut], 0)
    pieces.advance(tokens, 0)
    logits_BV = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits_BV[1] = logits_BV[0]
    one, other = applied(logits_BV, [whole, pieces])
    assert torch.equal(one, other)


def test_a_grammars_mask_covers_its_own_row_up_to_the_last_token_and_no_other() -> None:
    guided, free = Steering(SamplingParams(grammar="even"), EvenThenEnd()), None
    logits_BV = torch.randn(3, VOCABULARY)
    before = logits_BV.clone()
    steered_BV = applied(logits_BV, [free, guided, free])
    assert torch.equal(logits_BV, before)
    assert torch.equal(steered_BV[[0, 2]], logits_BV[[0, 2]])
    assert torch.equal(steered_BV[1, ::2], logits_BV[1, ::2])
    assert bool((steered_BV[1, 1::2] == -torch.inf).all())


def test_half_precision_logits_of_other_rows_keep_their_values() -> None:
    logits_BV = torch.randn(2, VOCABULARY).bfloat16()
    steered_BV = applied(logits_BV, [Steering(SamplingParams(logit_bias=((0, 1.0),)), None), None])
    assert torch.equal(steered_BV[1], logits_BV[1].float())


def test_nothing_is_packed_where_nothing_changes() -> None:
    assert SteeringColumns.pack([None, None], VOCABULARY, "cpu") is None
    assert SteeringColumns.pack([Steering(SamplingParams(presence_penalty=1.0), None)], VOCABULARY, "cpu") is None


def test_logprobs_are_the_log_softmax_of_the_rows_that_want_them() -> None:
    logits_BV = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    tokens_B = torch.tensor([4, 5, 6])
    none, bare, three = logprobs_of(logits_BV, tokens_B, [None, 0, 3])
    expected_BV = logits_BV.log_softmax(-1)
    assert none == ()
    assert bare == (TokenLogprobs(float(expected_BV[1, 5])),)
    assert three[0].logprob == float(expected_BV[2, 6])
    best = expected_BV[2].topk(3)
    assert three[0].top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    assert logprobs_of(logits_BV, tokens_B, [None] * 3) == ((), (), ())


def test_choices_draw_under_distinct_seeds_that_follow_from_the_first() -> None:
    seeds = [params.seed for params in choices(SamplingParams(seed=7), 8)]
    assert seeds == [params.seed for params in choices(SamplingParams(seed=7), 8)]
    assert seeds[0] == 7 and len(set(seeds)) == 8
    assert [params.seed for params in choices(SamplingParams(), 3)] == [None] * 3


# -- In the scheduler: preempted, handed over, submitted again


def scheduler(num_blocks: int = 32) -> Scheduler:
    return Scheduler(
        num_blocks=num_blocks,
        block_size=4,
        max_prefill_tokens=64,
        max_decode_rows=8,
        max_positions=64,
        vocab_size=VOCABULARY,
    )


def run(engine: Scheduler, steps: int) -> list[Emission]:
    """Greedy over logits that like high tokens, odd ones most."""
    likes = torch.arange(VOCABULARY, dtype=torch.float32) * 0.01
    likes[1::2] += 5
    emissions = []
    for step in range(steps):
        for unit in engine.plan(step).units:
            batch = engine.materialise(unit)
            if batch is not None:
                logits_BV = likes.expand(len(batch.sample_rows), -1)
                emissions += engine.commit(unit, batch, batch.choose(logits_BV).tolist())
    return emissions


GUIDED = Request(
    "a",
    (1, 2, 3),
    SamplingParams(max_tokens=10, temperature=0, grammar="even", frequency_penalty=1.0),
    eos_ids=frozenset({1}),
    grammar=EvenThenEnd(),
)


def test_a_guided_request_follows_its_grammar_to_the_end() -> None:
    engine = scheduler()
    engine.submit(GUIDED)
    found = run(engine, 8)
    assert [emission.token_id for emission in found] == [68, 66, 64, 62, 60, 1]  # each once: the penalty
    assert found[-1].finish_reason == "stop"


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_it_goes_on_alike_on_another_engine_after_any_step(steps: int) -> None:
    first, second = scheduler(), scheduler()
    first.submit(GUIDED)
    emissions = run(first, steps)
    moved = first.hand_over("a")
    assert moved is not None
    assert moved.request.grammar is None  # what one process compiled stays there
    second.submit(Request(**{**vars(moved.request), "grammar": EvenThenEnd()}))
    emissions += run(second, 8)
    assert [emission.token_id for emission in emissions] == [68, 66, 64, 62, 60, 1]


def test_a_preempted_one_goes_on_alike() -> None:
    engine = scheduler(num_blocks=3)
    engine.submit(Request("old", (1,) * 3, SamplingParams(max_tokens=10, temperature=0)))
    engine.submit(GUIDED)
    found = run(engine, 30)
    assert engine.preemptions > 0
    assert [emission.token_id for emission in found if emission.request_id == "a"] == [68, 66, 64, 62, 60, 1]


def test_a_grammar_that_can_be_followed_no_further_ends_its_request_as_failed() -> None:
    engine = scheduler()
    engine.submit(Request(**{**vars(GUIDED), "prefix_ids": (3,)}))  # odd: no text of this grammar begins so
    (last,) = run(engine, 3)
    assert (last.token_id, last.finish_reason) == (1, "failed")


def test_a_grammar_that_nobody_compiled_and_a_bias_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(RequestError, match="must compile it first"):
        scheduler().submit(Request(**{**vars(GUIDED), "grammar": None}))
    with pytest.raises(RequestError, match=r"logit_bias holds token id 70; ids must be in \[0, 70\)"):
        scheduler().submit(Request("b", (1,), SamplingParams(seed=1, logit_bias=((70, 1.0),))))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_p": -0.1}, r"min_p is -0.1; it must be a number in \[0, 1\]"),
        ({"presence_penalty": 2.5}, r"presence_penalty is 2.5; it must be a number in \[-2, 2\]"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": ((1, 101.0),)}, r"logit_bias is 101.0; it must be a number in \[-100, 100\]"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias is -1; it must be by token ids >= 0"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "distinct tokens"),
        ({"logprobs": 21}, r"logprobs is 21; it must be an integer in \[0, 20\]"),
        ({"grammar": ""}, "grammar is ''"),
        ({"grammar": "x", "ignore_eos": True}, "ignore_eos is True; it must be false"),
    ],
)
def test_parameters_out_of_bounds_are_refused_by_name(params: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)
