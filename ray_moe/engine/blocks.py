"""The MoE blocks of a trunk: what probing them shows, and their shared experts' place beside the routed exchange.

A block is transformers' own module around router, experts and, in some families, an always-on shared expert. Families
call the shared expert before or after the routed ones; either way the layer may run it while routed rows are in flight.
Letters: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ray_moe.engine.trunk import Binding, Trunk
from ray_moe.errors import ConfigError, UnsupportedModelError

# What families call their shared expert, inside the block that holds the routed ones.
_SHARED_NAMES = ("shared_expert", "shared_experts", "shared_mlp")
_PROBE_TOKENS = 2


@dataclass(frozen=True)
class BlockFacts:
    """One MoE layer's block: the dtype of its router's gates, and its shared expert if it has one."""

    gate: torch.dtype
    shared: nn.Module | None


def probe_blocks(trunk: Trunk) -> dict[int, BlockFacts]:
    """Run each block on a few rows with experts that return them unchanged; bindings are as before afterwards.

    Peers without tokens must answer in the gates' dtype, and that is the router's own affair: so it is measured. Shared
    experts that `overlap_shared` took for an earlier engine are their blocks' own again.
    """
    return {layer: _probe(trunk, experts) for layer, experts in trunk.experts.items()}


def overlap_shared(trunk: Trunk, blocks: Mapping[int, BlockFacts]) -> dict[int, SharedPath]:
    """A `SharedPath` for every block that has a shared expert, shown to give the block's own output bit for bit.

    An earlier engine's paths over the same trunk end. Raises `ConfigError` for a model without shared experts,
    `UnsupportedModelError` when a block reads its shared expert's output before its routed experts have run: no block
    is changed then.
    """
    with_shared = {layer: facts.shared for layer, facts in blocks.items() if facts.shared is not None}
    if not with_shared:
        raise ConfigError("strategy shared_path needs a model with shared experts; this one has none")
    try:
        return {layer: _overlapped(trunk, trunk.experts[layer], shared) for layer, shared in with_shared.items()}
    except BaseException:
        for shared in with_shared.values():
            SharedPath.give_back(shared)
        raise


def _probe(trunk: Trunk, experts: nn.Module) -> BlockFacts:
    gates: list[torch.dtype] = []

    def record(hidden_TD: Tensor, _ids: Tensor, weights_TK: Tensor) -> Tensor:
        gates.append(weights_TK.dtype)
        return hidden_TD

    block = _block(trunk, experts)
    named = (getattr(block, name, None) for name in _SHARED_NAMES)
    shared = next((module for module in named if isinstance(module, nn.Module)), None)
    if shared is not None:
        SharedPath.give_back(shared)
    _run_block(trunk, experts, record)
    return BlockFacts(gates[0], shared)


def _overlapped(trunk: Trunk, experts: nn.Module, shared: nn.Module) -> SharedPath:
    def routed(hidden_TD: Tensor, _ids: Tensor, _weights: Tensor) -> Tensor:
        return hidden_TD * 0.5

    SharedPath.give_back(shared)
    expected = _run_block(trunk, experts, routed)
    path = SharedPath(shared)

    def beside(hidden_TD: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        path.begin(hidden_TD)
        path.run()
        path.end()
        return routed(hidden_TD, ids, weights)

    if not torch.equal(_run_block(trunk, experts, beside), expected):
        raise UnsupportedModelError(
            trunk.config.model_type, "its blocks read their shared expert before the routed ones; use another strategy"
        )
    return path


def _run_block(trunk: Trunk, experts: nn.Module, binding: Binding) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _PROBE_TOKENS, trunk.hidden_size, generator=generator)
    bound: Any = experts
    before = getattr(experts, "ray_moe", None)
    bound.ray_moe = binding
    try:
        with torch.inference_mode():
            out = _block(trunk, experts)(rows.to(device=trunk.device, dtype=trunk.dtype))
    finally:
        bound.ray_moe = before
    return out[0] if isinstance(out, tuple) else out


def _block(trunk: Trunk, experts: nn.Module) -> nn.Module:
    """The module around router, experts and shared expert."""
    name: Any = experts.ray_moe_name
    return trunk.model.get_submodule(name.rpartition(".")[0])


class SharedPath:
    """Takes a block's shared expert out of the block's own order.

    `begin(hidden)` before the routed experts of one call, `run()` while their rows are in flight, `end()` after. A
    block that calls its shared expert first is given a tensor of NaN, which `run` fills before the block reads it; one
    that calls it last is given what `run` has computed.
    """

    def __init__(self, shared: nn.Module) -> None:
        self._compute = shared.forward
        self._hidden_TD: Tensor | None = None  # between `begin` and `end`
        self._promised: tuple[Tensor, Tensor] | None = None  # (input, what the block was given for it)
        self._computed: tuple[Tensor, Tensor] | None = None  # (input, output), until the block asks
        shared.forward = self._called

    @staticmethod
    def give_back(shared: nn.Module) -> None:
        """Undo what the last path did to `shared`, if one has it: paths never take one another's place in turn."""
        owner = getattr(shared.forward, "__self__", None)
        if isinstance(owner, SharedPath):
            shared.forward = owner._compute

    def begin(self, hidden_TD: Tensor) -> None:
        """The routed experts of these rows are about to run."""
        self._hidden_TD = hidden_TD

    def run(self) -> None:
        """Compute the shared expert's rows, once."""
        if self._promised is not None:
            given, out = self._promised
            self._promised = None
            out.copy_(self._compute(given))
        elif self._hidden_TD is not None:
            self._computed = (self._hidden_TD, self._compute(self._hidden_TD))
        self._hidden_TD = None

    def end(self) -> None:
        """The routed experts are done: what their path had no place for on the way is computed now."""
        if self._hidden_TD is not None:
            self.run()

    def _called(self, hidden: Tensor) -> Tensor:
        """What the block calls as its shared expert."""
        if self._computed is not None:
            (given, out), self._computed = self._computed, None
            if (given.data_ptr(), given.numel()) == (hidden.data_ptr(), hidden.numel()):
                return out.view(hidden.shape)
        out = torch.full_like(hidden, torch.nan)  # whoever reads it too early shall see it
        self._promised = (hidden, out)
        return out
