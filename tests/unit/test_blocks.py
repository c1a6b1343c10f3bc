"""The MoE blocks of a trunk: what probing finds in every family, and the shared expert's place beside the exchange."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

import tests.one_peer as one_peer
from ray_moe.comm.group import ExpertGroup
from ray_moe.engine.blocks import BlockFacts, SharedPath, overlap_shared, probe_blocks
from ray_moe.engine.sampling import SamplingParams
from ray_moe.engine.scheduler import Request
from ray_moe.engine.trunk import Trunk, load_trunk
from ray_moe.errors import ConfigError, UnsupportedModelError
from ray_moe.weights.sources import experts_modules
from tests.families import FAMILIES, MOE_LAYERS
from tests.one_peer import OnePeer
from tests.unit.test_chunks import IN_ORDER, Observing

# The families whose block has an always-on expert, and whether the block calls it before its routed experts.
SHARED_FIRST = {"qwen2_moe": True, "deepseek_v2": False, "deepseek_v3": False, "glm4_moe": False}
WITHOUT = tuple(name for name in FAMILIES if name not in SHARED_FIRST)
TOKENS = torch.tensor([[5, 3, 250, 17, 8, 91, 4]])
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
PROMPTS = {f"p{length}": tuple(1 + (7 * i + length) % 250 for i in range(length)) for length in (5, 33)}


def trunk_of(folder: Path, dtype: torch.dtype = torch.float32) -> Trunk:
    return load_trunk(folder, dtype=dtype, attn_implementation="eager")


def halved(hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Routed experts that any rounding would show: they depend on rows, ids and gates."""
    return hidden_TD * 0.5 + (ids_TK * weights_TK.float()).sum(1, keepdim=True).to(hidden_TD.dtype)


@torch.inference_mode()
def logits(trunk: Trunk) -> Tensor:
    return trunk.model(input_ids=TOKENS, use_cache=False).logits


def block_of(trunk: Trunk, layer: int) -> nn.Module:
    name: Any = trunk.experts[layer].ray_moe_name
    return trunk.model.get_submodule(name.rpartition(".")[0])


@torch.inference_mode()
def run_block(trunk: Trunk, layer: int, tokens: int) -> Tensor:
    rows = torch.randn(1, tokens, trunk.hidden_size, generator=torch.Generator().manual_seed(tokens))
    out = block_of(trunk, layer)(rows.to(trunk.dtype))
    return out[0] if isinstance(out, tuple) else out


# -- Probing


@torch.inference_mode()
def gate_dtypes(folder: Path, dtype: torch.dtype) -> dict[int, torch.dtype]:
    """What transformers' own routers hand to transformers' own experts."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager", local_files_only=True
    ).eval()
    seen: dict[int, torch.dtype] = {}
    for layer, _, module in experts_modules(model):

        def record(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], layer: int = layer) -> None:
            (weights,) = [each for each in (*args[1:], *kwargs.values()) if each.is_floating_point()]
            seen[layer] = weights.dtype

        module.register_forward_pre_hook(record, with_kwargs=True)
    model(input_ids=TOKENS, use_cache=False)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_probing_finds_each_familys_gates_and_shared_expert_and_changes_nothing(
    family_dir: Callable[..., Path], family: str, dtype: torch.dtype
) -> None:
    trunk = trunk_of(family_dir(family), dtype)
    trunk.bind(lambda layer, module: halved)
    before = logits(trunk)
    blocks = probe_blocks(trunk)
    assert tuple(blocks) == MOE_LAYERS[family]
    assert {layer: facts.gate for layer, facts in blocks.items()} == gate_dtypes(family_dir(family), dtype)
    for layer, facts in blocks.items():
        prefix = re.escape(str(trunk.experts[layer].ray_moe_name).rpartition(".")[0])
        own = {
            name: parameter
            for name, parameter in trunk.model.named_parameters()
            if re.match(rf"{prefix}\.shared_experts?\.", name)
        }
        found = list(facts.shared.parameters()) if facts.shared is not None else []
        assert {id(parameter) for parameter in found} == {id(parameter) for parameter in own.values()}
        assert bool(own) == (family in SHARED_FIRST)
    assert all(module.ray_moe is halved for module in trunk.experts.values())
    assert torch.equal(logits(trunk), before)


def test_probing_a_trunk_that_nothing_is_bound_to_binds_nothing(family_dir: Callable[..., Path]) -> None:
    trunk = trunk_of(family_dir("qwen2_moe"))
    probe_blocks(trunk)
    assert all(getattr(module, "ray_moe", None) is None for module in trunk.experts.values())


# -- Overlap changes no bit


def overlapped(path: SharedPath, on_the_way: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`halved` as the engine calls a layer; the layer's strategy may have no place for the shared expert."""

    def run(hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        path.begin(hidden_TD)
        if on_the_way:
            path.run()
        out_TD = halved(hidden_TD, ids_TK, weights_TK)
        path.end()
        return out_TD

    return run


@pytest.mark.parametrize("on_the_way", [True, False])
@pytest.mark.parametrize("family", SHARED_FIRST)
def test_a_shared_expert_beside_the_exchange_changes_no_bit_of_its_block(
    family_dir: Callable[..., Path], family: str, on_the_way: bool
) -> None:
    trunk = trunk_of(family_dir(family))
    trunk.bind(lambda layer, module: halved)
    sizes = (1, 7, 1, 3)
    expected = {(layer, size): run_block(trunk, layer, size) for layer in trunk.experts for size in sizes}
    whole = logits(trunk)
    paths = overlap_shared(trunk, probe_blocks(trunk))
    assert tuple(paths) == MOE_LAYERS[family]
    trunk.bind(lambda layer, module: overlapped(paths[layer], on_the_way))
    for layer in trunk.experts:
        for size in sizes:
            assert torch.equal(run_block(trunk, layer, size), expected[layer, size]), (layer, size)
    assert torch.equal(logits(trunk), whole)


@pytest.mark.parametrize("family", SHARED_FIRST)
def test_the_shared_expert_is_computed_once_for_each_call_of_its_block(
    family_dir: Callable[..., Path], family: str
) -> None:
    trunk = trunk_of(family_dir(family))
    blocks = probe_blocks(trunk)
    paths, computed = overlap_shared(trunk, blocks), []
    trunk.bind(lambda layer, module: overlapped(paths[layer], True))
    for facts in blocks.values():
        watch(facts, lambda: computed.append(1))
    logits(trunk)
    assert len(computed) == len(blocks)


def watch(facts: BlockFacts, seen: Callable[[], Any]) -> None:
    """Call `seen` whenever the shared expert computes: its last projection runs, whoever called it."""
    assert facts.shared is not None
    last: Any = facts.shared.down_proj
    last.register_forward_pre_hook(lambda *_: seen() and None)


@pytest.mark.parametrize("family", WITHOUT)
def test_a_family_without_shared_experts_is_refused_for_shared_path(
    family_dir: Callable[..., Path], family: str
) -> None:
    with pytest.raises(ConfigError, match="strategy shared_path needs a model with shared experts; this one has none"):
        OnePeer(family_dir(family), strategy="shared_path")


class EarlyReader(nn.Module):
    """A block whose router reads the shared expert's output: nothing can run beside that."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_expert = block.gate, block.experts, block.shared_expert

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.view(-1, hidden.shape[-1])
        rows = rows + self.shared_expert(rows)
        _, weights, selected = self.gate(rows)
        return self.experts(rows, selected, weights).view(hidden.shape)


class TooLate(nn.Module):
    """A block whose shared expert takes what the routed ones gave: it cannot run before they have."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_expert = block.gate, block.experts, block.shared_expert

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.view(-1, hidden.shape[-1])
        _, weights, selected = self.gate(rows)
        return self.shared_expert(self.experts(rows, selected, weights)).view(hidden.shape)


@pytest.mark.parametrize("kind", [EarlyReader, TooLate])
def test_a_block_that_cannot_wait_for_its_shared_expert_is_refused_and_no_block_is_changed(
    family_dir: Callable[..., Path], kind: type[nn.Module]
) -> None:
    trunk = trunk_of(family_dir("qwen2_moe"))
    last = max(trunk.experts)  # the blocks before it have been taken by then
    owner: Any = trunk.model.get_submodule(str(trunk.experts[last].ray_moe_name).rsplit(".", 2)[0])
    owner.mlp = kind(owner.mlp)
    trunk.bind(lambda layer, module: halved)
    before = logits(trunk)
    blocks = probe_blocks(trunk)
    with pytest.raises(UnsupportedModelError, match=r"qwen2_moe.*shared expert.*use another strategy"):
        overlap_shared(trunk, blocks)
    assert torch.equal(logits(trunk), before)


# -- Two engines over one trunk


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_paths_over_one_trunk_do_not_stack(family_dir: Callable[..., Path], family: str) -> None:
    trunk = trunk_of(family_dir(family))
    trunk.bind(lambda layer, module: halved)
    whole = logits(trunk)
    blocks = probe_blocks(trunk)
    first = overlap_shared(trunk, blocks)
    second = overlap_shared(trunk, blocks)
    trunk.bind(lambda layer, module: overlapped(second[layer], True))
    assert torch.equal(logits(trunk), whole)
    # Its place is taken: what the first one still does reaches no block.
    trunk.bind(lambda layer, module: overlapped(first[layer], True))
    probe_blocks(trunk)
    assert torch.equal(logits(trunk), whole)
    trunk.bind(lambda layer, module: halved)
    assert torch.equal(logits(trunk), whole)


def serve(peer: OnePeer) -> dict[str, list[int]]:
    with peer:
        for name, prompt in PROMPTS.items():
            peer.loop.submit(Request(name, prompt, GREEDY))
        peer.outlet.until_ended(*PROMPTS)
    assert peer.raised is None
    assert all(counters.audited == counters.invocations > 0 for counters in peer.counters.values())
    return {name: peer.outlet.tokens(name) for name in PROMPTS}


@pytest.mark.parametrize("family", SHARED_FIRST)
def test_an_engine_on_the_shared_path_gives_the_bulk_engines_tokens(
    family_dir: Callable[..., Path], family: str
) -> None:
    folder = family_dir(family)
    assert serve(OnePeer(folder, strategy="shared_path")) == serve(OnePeer(folder))


@pytest.mark.parametrize("strategy", ["shared_path", "bulk"])
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_a_second_engine_over_the_same_trunk_gives_the_same_tokens(
    family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str, strategy: str
) -> None:
    first = OnePeer(family_dir(family), strategy="shared_path")
    expected = serve(first)
    monkeypatch.setattr(one_peer, "load_trunk", lambda *_, **__: first.trunk)
    assert serve(OnePeer(family_dir(family), strategy=strategy)) == expected


# -- Between submission and wait


@pytest.fixture
def observed_engine(family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Observing] = []

    def observing(name: str, group: ExpertGroup) -> Observing:
        made.append(Observing(transport_named(name, group)))
        return made[-1]

    transport_named = one_peer.transport_named
    monkeypatch.setattr(one_peer, "transport_named", observing)
    return lambda family: (OnePeer(family_dir(family), strategy="shared_path"), made[-1])


@pytest.mark.parametrize("family", SHARED_FIRST)
def test_the_engines_real_shared_experts_run_between_submission_and_wait(observed_engine: Any, family: str) -> None:
    peer, transport = observed_engine(family)
    peer.loop._units._audit_every = 0  # audits exchange as well
    for facts in peer.blocks.values():
        watch(facts, lambda: transport.seen.append("shared"))
    with peer:
        peer.loop.submit(Request("r", PROMPTS["p5"], GREEDY))
        peer.outlet.until_ended("r")
    assert transport.seen
    assert len(transport.seen) % len(IN_ORDER) == 0
    for start in range(0, len(transport.seen), len(IN_ORDER)):
        assert transport.seen[start : start + len(IN_ORDER)] == IN_ORDER
