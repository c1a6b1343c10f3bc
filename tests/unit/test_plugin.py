"""The transformers plug-in: models of eight families with the experts of an engine loop in this process; no Ray.

The oracle is the same checkpoint as transformers runs it by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import ray_moe
from ray_moe import plugin
from ray_moe.errors import ConfigError, NotServingError
from ray_moe.weights.sources import experts_modules
from tests.families import FAMILIES
from tests.one_peer import OnePeer
from tests.unit.test_bare import Caller, results

FP32 = {"rtol": 1e-4, "atol": 1e-5}  # two orders of fp32 sums, through three layers
IDS = torch.tensor([[5 + 7 * place % 250 for place in range(21)], [3 + 11 * place % 250 for place in range(21)]])


class Service:
    """Calls of one peer's layers, bound as the routing actor binds them."""

    def __init__(self, peer: OnePeer) -> None:
        self.caller = Caller(peer)
        self.place = {layer.layer: place for place, layer in enumerate(peer._placed.layers)}  # type: ignore[union-attr]
        self.calls: list[int] = []

    def experts(self, layer: int) -> Layer:
        return Layer(self, layer)


class Layer:
    def __init__(self, service: Service, layer: int) -> None:
        self.service, self.layer = service, layer

    def forward(self, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        service = self.service
        service.calls.append(self.layer)
        handle = service.caller.bind(service.place[self.layer], ids, gates)
        (result,) = results(service.caller, [service.caller.call(handle, hidden)])
        return result.out_TD.clone()


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    yield
    plugin.unregister()


def routed_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for _, _, module in experts_modules(model) for parameter in module.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_logits_of_its_local_model_and_no_routed_expert(
    family_dir: Callable[..., Path], family: str
) -> None:
    folder = family_dir(family)
    local = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = local(IDS).logits
    with OnePeer(folder) as peer:
        service = Service(peer)
        ray_moe.register(service)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="ray_moe")
        trunk = ray_moe.load_trunk(folder)
        for remote in (model.eval(), trunk, copy.deepcopy(trunk)):
            assert routed_parameters(remote) == 0
            assert routed_parameters(local) > 0
            service.calls.clear()
            with torch.no_grad():
                logits = remote(IDS).logits
            torch.testing.assert_close(logits, expected, **FP32)
            assert torch.equal(logits.argmax(-1), expected.argmax(-1))
            assert service.calls == [layer for layer, _, _ in experts_modules(local)]
        short = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 258}
        assert torch.equal(trunk.generate(IDS[:1], **short), local.generate(IDS[:1], **short)), "its own generate works"
    assert peer.raised is None


def test_a_forward_without_a_cluster_is_named(family_dir: Callable[..., Path]) -> None:
    with OnePeer(family_dir("qwen3_moe")) as peer:
        ray_moe.register(Service(peer))
        model = AutoModelForCausalLM.from_pretrained(
            family_dir("qwen3_moe"), dtype=torch.float32, experts_implementation="ray_moe"
        )
        trunk = ray_moe.load_trunk(family_dir("qwen3_moe"), cluster=Service(peer))
        ray_moe.unregister()
        with pytest.raises(NotServingError, match="no binding"):
            model(IDS)
        trunk(IDS)  # it is bound to its own cluster
    with pytest.raises(NotServingError):
        trunk(IDS)


def test_models_built_before_the_registration_keep_their_experts(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("mixtral")
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with OnePeer(folder) as peer:
        ray_moe.register(Service(peer))
        beside = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # another implementation
        assert routed_parameters(before) == routed_parameters(beside) > 0
        with torch.no_grad():
            expected = before(IDS).logits
            plugin.bind(before, Service(peer))
            before.set_experts_implementation("ray_moe")
            torch.testing.assert_close(before(IDS).logits, expected, **FP32)


def test_an_unknown_layer_and_what_is_no_cluster_are_refused(family_dir: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"what ray_moe.connect or ray_moe.MoEClient gives, found int"):
        ray_moe.register(3)
    with pytest.raises(ConfigError, match="it has no MoE block"):
        plugin.bind(nn.Linear(2, 2), Service.__new__(Service))
    model = AutoModelForCausalLM.from_pretrained(family_dir("mixtral"), dtype=torch.float32)
    ray_moe.register(Service.__new__(Service))
    model.set_experts_implementation("ray_moe")
    with pytest.raises(NotServingError, match=r"not known which layer MixtralExperts is: build its model after"):
        model(IDS)


def test_whoever_asks_for_gradients_is_told_that_there_are_none(family_dir: Callable[..., Path]) -> None:
    with OnePeer(family_dir("mixtral")) as peer:
        trunk = ray_moe.load_trunk(family_dir("mixtral"), cluster=Service(peer)).requires_grad_(True)
        with pytest.raises(ConfigError, match="have no gradients"):
            trunk(IDS).logits.sum().backward()
