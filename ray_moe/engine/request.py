"""A generation request inside one engine: what was asked, how far it is, the states it goes through, who may enter."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Literal

from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.steering import Grammar, Steering
from ray_moe.errors import ConfigError, RayMoEError, RequestError

FinishReason = Literal["stop", "length", "failed"]  # failed: its grammar can be followed no further


class RequestState(enum.Enum):
    WAITING = "waiting"  # holds no KV: new, or preempted
    PREFILL = "prefill"  # holds KV; some of its known tokens are not planned yet
    DECODE = "decode"  # all its known tokens are planned; each step adds one
    FINISHED = "finished"
    CANCELLED = "cancelled"
    HANDED_OVER = "handed_over"  # another engine goes on with it


class RequestEvent(enum.Enum):
    ADMIT = "admit"  # blocks for all its tokens were free
    RESUME = "resume"  # it was adopted with the KV of all its tokens but the last, and blocks were free
    FILL = "fill"  # the last of its known tokens was planned, and samples
    PREEMPT = "preempt"  # an older request needed its blocks
    FINISH = "finish"  # its last token was committed
    CANCEL = "cancel"  # its submitter gave up, or the engine failed
    HAND_OVER = "hand_over"  # this peer is leaving


_WAITING, _PREFILL, _DECODE = RequestState.WAITING, RequestState.PREFILL, RequestState.DECODE

TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (_WAITING, RequestEvent.ADMIT): RequestState.PREFILL,
    (_WAITING, RequestEvent.RESUME): RequestState.DECODE,
    (_PREFILL, RequestEvent.FILL): RequestState.DECODE,
    (_PREFILL, RequestEvent.PREEMPT): RequestState.WAITING,
    (_DECODE, RequestEvent.PREEMPT): RequestState.WAITING,
    (_DECODE, RequestEvent.FINISH): RequestState.FINISHED,
    # A preempted request's token of the step in flight still counts, and can be its last; with more than one step of
    # look-ahead it may have been admitted again by then.
    (_WAITING, RequestEvent.FINISH): RequestState.FINISHED,
    (_PREFILL, RequestEvent.FINISH): RequestState.FINISHED,
    (_WAITING, RequestEvent.CANCEL): RequestState.CANCELLED,
    (_PREFILL, RequestEvent.CANCEL): RequestState.CANCELLED,
    (_DECODE, RequestEvent.CANCEL): RequestState.CANCELLED,
    # A row that is planned and has not run never runs here: the engine that adopts the request plans it again.
    (_WAITING, RequestEvent.HAND_OVER): RequestState.HANDED_OVER,
    (_PREFILL, RequestEvent.HAND_OVER): RequestState.HANDED_OVER,
    (_DECODE, RequestEvent.HAND_OVER): RequestState.HANDED_OVER,
}


def advance(state: RequestState, event: RequestEvent) -> RequestState:
    """The next state; RayMoEError when the table has no such edge."""
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise RayMoEError(f"a request in state {state.value!r} cannot take the event {event.value!r}")
    return following


@dataclass(frozen=True)
class Request:
    """What was asked for.

    `prefix_ids` are tokens that an earlier submission delivered: generation goes on at index len(prefix_ids), and
    max_tokens counts them. A request that draws is submitted with its seed (`sampling.admitted`). All its tokens are of
    one `checkpoint`, named when an engine admits it; its KV is that checkpoint's. `grammar` is its parameters' grammar
    as one peer has compiled it: it stays there.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prefix_ids: tuple[int, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    checkpoint: str = ""
    grammar: Grammar | None = field(default=None, compare=False, repr=False)

    @property
    def positions(self) -> int:
        """Positions whose KV it ever writes: the last token is delivered, not computed on."""
        return len(self.prompt_ids) + self.params.max_tokens - 1

    def finish_reason(self, token: int, generated: int) -> FinishReason | None:
        """Why `token`, as the last of `generated` tokens, ends the generation; None when it goes on."""
        if token in self.eos_ids and not self.params.ignore_eos:
            return "stop"
        return "length" if generated >= self.params.max_tokens else None


@dataclass(eq=False)
class OpenRequest:
    """How far a request is. `tokens` are known (prompt, prefix, committed); the KV of positions below `committed` is
    written, that of positions below `planned` is written or in a unit in flight; `pending` tokens are yet to come from
    units in flight. `ticket` orders submissions; `residency` counts preemptions."""

    request: Request
    ticket: int
    tokens: list[int] = field(init=False)
    blocks: tuple[int, ...] = ()
    committed: int = 0
    planned: int = 0
    pending: int = 0
    residency: int = 0
    state: RequestState = RequestState.WAITING
    _steering: Steering | None = None

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_ids, *self.request.prefix_ids]
        if self.request.params.steered:
            self._steering = Steering(self.request.params, self.request.grammar)

    def take(self, event: RequestEvent) -> None:
        self.state = advance(self.state, event)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def steered(self) -> bool:
        """Whether its logits are changed before a token is taken."""
        return self._steering is not None

    def steer(self) -> Steering | None:
        """What is done to its logits at the token after those that it has; None for nothing."""
        if self._steering is not None:
            self._steering.advance(self.tokens, len(self.request.prompt_ids))
        return self._steering

    def finish_reason(self, token: int) -> FinishReason | None:
        """Why `token`, its last so far, ends it; None when it goes on."""
        reason = self.request.finish_reason(token, self.generated)
        failed = reason is not None and self._steering is not None and bool(self._steering.failure)
        return "failed" if failed else reason

    @property
    def expected(self) -> int:
        """Its tokens once everything in flight is committed."""
        return len(self.tokens) + self.pending

    @property
    def settled(self) -> bool:
        """Its last token is in flight: nothing is left to plan."""
        return self.expected > self.request.positions

    def is_of(self, checkpoint: str | None) -> bool:
        """Whether its tokens come from that checkpoint; None takes any."""
        return checkpoint is None or self.request.checkpoint == checkpoint

    @property
    def begun(self) -> bool:
        """Whether somebody is reading its stream already, or it has run here before."""
        return bool(self.request.prefix_ids) or self.residency > 0

    def resubmission(self) -> Request:
        """The request as somebody would submit it again, with all committed tokens as its prefix."""
        return replace(self.request, prefix_ids=tuple(self.tokens[len(self.request.prompt_ids) :]), grammar=None)


@dataclass(frozen=True)
class AdmissionLimits:
    """What an engine can serve: `max_positions` bounds prompt + max_tokens; a KV block holds `block_size` tokens."""

    num_blocks: int
    block_size: int
    max_positions: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be >= 1")

    def blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def check(self, request: Request) -> None:
        """Raises RequestError naming the field, its value and its bound when the request can never be served."""
        params, prompt = request.params, len(request.prompt_ids)
        total, blocks = prompt + params.max_tokens, self.blocks_for(request.positions)
        asked = f"prompt ({prompt} tokens) and max_tokens ({params.max_tokens})"
        if prompt == 0:
            raise RequestError("the prompt has 0 tokens; it must have at least 1", "prompt")
        if total > self.max_positions:
            raise RequestError(f"{asked} add up to {total}; positions end at {self.max_positions}", "max_tokens")
        if blocks > self.num_blocks:
            raise RequestError(
                f"{asked} need {blocks} KV blocks of {self.block_size} tokens; there are {self.num_blocks}",
                "max_tokens",
            )
        for param, ids in (("prompt", request.prompt_ids), ("prefix_ids", request.prefix_ids)):
            for token in ids:
                if not isinstance(token, Integral) or not 0 <= token < self.vocab_size:
                    raise RequestError(
                        f"{param} holds token id {token!r}; ids must be in [0, {self.vocab_size})", param
                    )
        biased = next((token for token, _ in params.logit_bias if token >= self.vocab_size), None)
        if biased is not None:
            raise RequestError(
                f"logit_bias holds token id {biased}; ids must be in [0, {self.vocab_size})", "logit_bias"
            )
        if params.grammar is not None and request.grammar is None:
            raise RequestError("grammar is text; whoever admits the request must compile it first", "grammar")
        prefix = len(request.prefix_ids)
        if prefix >= params.max_tokens:
            raise RequestError(
                f"prefix_ids has {prefix} tokens; it must have < max_tokens = {params.max_tokens}", "prefix_ids"
            )
        ended = next((token for token in request.prefix_ids if request.finish_reason(token, 0)), None)
        if ended is not None:
            raise RequestError(f"prefix_ids holds end-of-sequence id {ended}; it must end before one", "prefix_ids")
        if params.seed is None and not params.greedy:
            raise RequestError(
                f"seed is None at temperature {params.temperature:g}; a request that draws needs a 64-bit integer",
                "seed",
            )
