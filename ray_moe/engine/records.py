"""What crosses between an engine and whoever submits to it.

Whoever submits keeps the prompt and the delivered tokens; with both, any engine can continue the stream (`prefix_ids`).
Nothing here imports torch, so that a command that only asks a cluster for its status need not either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ray_moe.errors import RayMoEError

if TYPE_CHECKING:
    from ray_moe.dataplane.route_counts import DemandReport
    from ray_moe.engine.generation import GenerationView
    from ray_moe.engine.sampling import SamplingParams
    from ray_moe.engine.steering import TokenLogprobs


@dataclass(frozen=True)
class GenerateRequest:
    """One generation. `prefix_ids` are tokens that an earlier submission already delivered: the stream goes on at index
    `len(prefix_ids)`, and `params.max_tokens` counts them."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prefix_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class StreamRecord:
    """Tokens of one request from one step. `index` is the position of the first of `token_ids` in the generation; a
    reader ignores an index it already has. The last record has a `finish_reason`: stop, length, failed (its grammar can
    be followed no further) or cancelled (then it has no tokens). `logprobs` has an entry per token, or none when they
    were not asked for."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    step: int
    generation: int
    epoch: int
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A request ends with an error that its caller can act on."""

    request_id: str
    error: RayMoEError


@dataclass(frozen=True)
class Moved:
    """A request's stay on this peer has ended; nothing follows here. `rank` is the peer that goes on with it under the
    same id; None when no peer does, and whoever submitted it submits it again, with the tokens it has as prefix."""

    request_id: str
    rank: int | None


Delivery = StreamRecord | Refusal | Moved


@dataclass(frozen=True)
class Members:
    """The peers that admit requests, as (rank, actor handle). Ranks are never used again; a newer `version` replaces
    an older one."""

    version: int
    peers: tuple[tuple[int, Any], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.peers)


class Outlet(Protocol):
    """Where a loop's results go. Called on the loop's thread; must return at once."""

    def deliver(self, items: Sequence[Delivery]) -> None:
        """Everything that one step, or one action, has for callers."""

    def demand(self, reports: Sequence[DemandReport]) -> None:
        """What this peer's routers asked for, oldest first."""

    def lease_returned(self, view: GenerationView) -> None:
        """No local handle of `view` is left; its lease can go back."""

    def wake_peers(self) -> None:
        """This peer has work while the others may be asleep."""


@dataclass(frozen=True)
class Load:
    """What the scheduler holds, as of the last step: for other threads, which must not look into it themselves.
    `beside` are open requests of the checkpoint of the view that runs beside the main one."""

    waiting: int
    running: int
    outstanding_tokens: int
    kv_blocks_used: int
    beside: int = 0


@dataclass(frozen=True)
class EngineStatus:
    """What one peer says about itself; counters are exact totals since it started.

    Bytes are those that the groups counted. Decode units were replayed, or fell back for the reasons given.
    `peak_live_bytes` is the most that one layer's invocation held. `fan_out` sums the tokens of audited invocations,
    and the ranks and nodes that they reached. `local` layer invocations ran on one device alone; `torch_runners` says
    why a CUDA device's experts are computed by torch. `bare_calls` of single layers brought `bare_tokens`.
    """

    rank: int
    state: str
    failure: str
    generation: int
    epoch: int
    committed_step: int
    steps_agreed: int
    steps_worked: int
    seconds_worked: float
    seconds_agreeing: float
    slow_step_seconds: float
    waiting: int
    running: int
    outstanding_tokens: int
    tokens_emitted: int
    kv_blocks_used: int
    kv_blocks_total: int
    rows_local: int
    rows_sent: int
    rows_received: int
    audited: int
    bytes_sent: int = 0
    bytes_received: int = 0
    replays: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    choices: dict[str, int] = field(default_factory=dict)
    local: int = 0
    torch_runners: dict[str, int] = field(default_factory=dict)
    peak_live_bytes: int = 0
    fan_out: dict[str, int] = field(default_factory=dict)
    resident_slots: dict[int, int] = field(default_factory=dict)
    resident_bytes: int = 0
    peak_resident_bytes: int = 0
    trunk_has_experts: bool = False
    bare_calls: int = 0
    bare_tokens: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """What a peer knows about the model once its trunk is loaded; equal on every peer.

    `expert_bytes` are in the dtype of the pools, `gate_dtype` is by torch's name. `top_k` are routes per token.
    """

    checkpoint_version: str
    moe_layers: tuple[int, ...]
    num_experts: int
    expert_bytes: int
    vocab_size: int
    max_positions: int
    gate_dtype: str
    trunk_parameters: int
    hidden_size: int = 0
    top_k: int = 0


@dataclass(frozen=True)
class LoadProgress:
    """How far this peer is with its one-time work; read by whoever draws a progress bar."""

    phase: str = "starting"
    done: int = 0
    total: int = 0
