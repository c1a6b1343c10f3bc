"""A generation as text, over a scripted client: whoever waits for the whole of it reads what a stream reads, and
whoever leaves ends it. The oracle is the stream, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.engine.records import StreamRecord
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.steering import TokenLogprobs
from ray_moe.errors import PeerLostError
from ray_moe.models import tiny_moe_path
from ray_moe.serve.generation import Backend, Backends, Step, TextGeneration
from ray_moe.text import load_tokenizer
from tests.layers import untimed

TOKENIZER = load_tokenizer(tiny_moe_path())


class ScriptedClient:
    """Delivers these tokens, one per step, the last with `finish`; or raises after them."""

    def __init__(self, tokens: Sequence[int], finish: str | None = "length", error: Exception | None = None) -> None:
        self.directory = SimpleNamespace(config=SimpleNamespace(request_deadline_s=20.0))
        self.tokens, self.finish, self.error = tokens, finish, error
        self.opened = self.closed = 0

    async def stream(self, prompt_ids: Sequence[int], params: Any, *, request_id: str) -> AsyncIterator[StreamRecord]:
        self.opened += 1
        try:
            for index, token in enumerate(self.tokens):
                await asyncio.sleep(0)
                last = index == len(self.tokens) - 1
                scores = (TokenLogprobs(-float(index), ()),)
                yield StreamRecord(request_id, index, (token,), index, 1, 1, self.finish if last else None, scores)
            if self.error is not None:
                raise self.error
            if self.finish is None:
                await asyncio.sleep(60)
        finally:
            self.closed += 1


def generation_of(client: ScriptedClient, params: SamplingParams, *, keep_special: bool = False) -> TextGeneration:
    backend = Backend(client, TOKENIZER, "m", "r", 0)  # type: ignore[arg-type]
    return TextGeneration(Backends(SimpleNamespace()), backend, "a", (5,), params, keep_special=keep_special)  # type: ignore[arg-type]


async def read(generation: TextGeneration) -> list[Step]:
    return [step async for step in generation.steps()]


def together(steps: Sequence[Step]) -> tuple[str, int, str | None, tuple[tuple[int, TokenLogprobs], ...]]:
    tokens = tuple(token for step in steps for token in step.tokens)
    return "".join(step.text for step in steps), steps[-1].completion_tokens, steps[-1].finish_reason, tokens


def whole(client: ScriptedClient, params: SamplingParams, *, patient: bool, keep_special: bool) -> list[Step]:
    async def run() -> list[Step]:
        generation = generation_of(client, params, keep_special=keep_special)
        generation.patient = patient
        return await read(generation)

    return asyncio.run(run())


@untimed
@given(
    text=st.text(st.sampled_from("ab é漢🚀"), min_size=1, max_size=12),
    stop=st.lists(st.text("ab é漢", min_size=1, max_size=2), max_size=2),
    finish=st.sampled_from(["length", "stop"]),
    keep_special=st.booleans(),
)
def test_a_patient_reader_reads_what_a_stream_gives(
    text: str, stop: list[str], finish: str, keep_special: bool
) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    params = SamplingParams(max_tokens=len(tokens), stop=tuple(stop))
    streamed, awaited = (
        whole(ScriptedClient(tokens, finish), params, patient=patient, keep_special=keep_special)
        for patient in (False, True)
    )
    assert together(awaited) == together(streamed)


def test_a_patient_reader_is_woken_by_the_first_step_and_by_the_last() -> None:
    client = ScriptedClient(TOKENIZER.encode("to be, or not to be, that is the question", add_special_tokens=False))
    params = SamplingParams(max_tokens=64)
    steps = whole(client, params, patient=True, keep_special=False)
    assert len(client.tokens) > 8
    assert [step.completion_tokens for step in steps] == [1, len(client.tokens)]


def test_a_patient_reader_hears_of_a_peer_that_is_lost() -> None:
    client = ScriptedClient((20, 21, 22), None, PeerLostError("gone", 1, 0, 0))
    with pytest.raises(PeerLostError):
        whole(client, SamplingParams(max_tokens=64), patient=True, keep_special=False)


@pytest.mark.parametrize("turns", range(8))
def test_a_generation_that_is_closed_at_any_moment_closes_its_stream(turns: int) -> None:
    async def run() -> ScriptedClient:
        client = ScriptedClient((20, 21, 22), None)
        generation = generation_of(client, SamplingParams(max_tokens=64))
        for _ in range(turns):
            await asyncio.sleep(0)
        generation.close()
        generation.close()
        for _ in range(4):
            await asyncio.sleep(0)
        return client

    client = asyncio.run(run())
    assert client.closed == client.opened == (turns > 0)
