"""Somebody's own transformers model with the experts of a cluster.

    ray_moe.register(cluster)                       # what ray_moe.connect(...) or MoEClient(...) gave
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="ray_moe")
    model = ray_moe.load_trunk(path)                # the same without reading the experts from disk

Attention, norms, routers, shared experts and the head run here; the routed experts of every MoE layer are a call of the
cluster. A model that is built with `experts_implementation="ray_moe"` after `register` keeps no routed expert's
parameters, and its experts modules call the cluster that was registered last. Letters: T tokens, K top-k, D hidden.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ray_moe.engine.trunk import EXPERTS_IMPLEMENTATION, bound_experts_forward
from ray_moe.engine.trunk import load_trunk as load_whole_trunk
from ray_moe.errors import ConfigError, NotServingError
from ray_moe.weights.sources import experts_modules


class Layer(Protocol):
    """One MoE layer of a cluster, from inside it or over HTTP."""

    def forward(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """Gate-weighted sums [T, D]."""
        ...


class Service(Protocol):
    """Whoever has the experts: `ClusterClient`, `MoEClient`."""

    def experts(self, layer: int) -> Layer:
        """One MoE layer."""
        ...


_LOCK = threading.Lock()
# Process-wide, as transformers' registry is: the service that was registered last, and what sees models being built.
_registered: list[Service] = []
_watching: list[RemovableHandle] = []


def register(cluster: Any) -> Service:
    """From here on models that are built with `experts_implementation="ray_moe"` call the experts of `cluster`.

    `cluster` is what `ray_moe.connect`, `ray_moe.MoEClient` or `ray_moe.cluster` gives; another one replaces it.
    Returns what the layers are called through. Raises `ConfigError` for anything else.
    """
    service = _service_of(cluster)
    with _LOCK:
        _registered[:] = [service]
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, remote_experts_forward)
        if not _watching:
            _watching.append(register_module_module_registration_hook(_note_layer))
    return service


def unregister() -> None:
    """No cluster has the experts any more: a forward raises `NotServingError`. Models keep what `bind` gave them."""
    with _LOCK:
        _registered.clear()
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, bound_experts_forward)
        while _watching:
            _watching.pop().remove()


def load_trunk(
    path: str | Path,
    *,
    cluster: Any = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model at `path` without its routed experts, whose tensors are not even read; `dtype` is the cluster's.

    Its experts are those of `cluster`, or of the one that is registered. By default attention is torch's, or eager
    where the family has no other. Raises what `engine.trunk.load_trunk` does.
    """

    def load(attention: str) -> PreTrainedModel:
        trunk = load_whole_trunk(
            path, dtype=dtype, device=device, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
        for layer, module in trunk.experts.items():
            module.ray_moe_layer = layer  # type: ignore[assignment]
        return trunk.model

    if attn_implementation is None:
        try:
            model = load("sdpa")
        except ConfigError:
            model = load("eager")
    else:
        model = load(attn_implementation)
    if cluster is not None:
        bind(model, cluster)
    return model


def bind(model: nn.Module, cluster: Any) -> None:
    """Let one model call the experts of one cluster, whichever is registered.

    Raises `UnsupportedModelError` for a model without modules behind transformers' experts interface.
    """
    service = _service_of(cluster)
    for layer, _, module in experts_modules(model):
        module.ray_moe = RemoteExperts(service, layer)  # type: ignore[assignment]


def remote_experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The `ray_moe` experts implementation of a process that registered a cluster.

    Raises `NotServingError` where none is registered, or it is gone, and whatever else a call of a layer raises.
    """
    if getattr(self, "ray_moe", None) is not None:
        return bound_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    if not _registered:
        raise NotServingError("no cluster is registered: call ray_moe.register(cluster) before a forward")
    return RemoteExperts(_registered[-1], _layer_of(self))(hidden_states, top_k_index, top_k_weights)


class RemoteExperts:
    """The experts of one layer, as an experts module calls them."""

    def __init__(self, service: Service, layer: int) -> None:
        self.service, self.layer = service, layer

    def __call__(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        out_TD: Tensor = _RemoteForward.apply(hidden_TD, topk_ids_TK, topk_weights_TK, self)
        return out_TD

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteExperts:
        return self  # a copied model calls the same cluster


class _RemoteForward(torch.autograd.Function):
    """A call has a value and no gradient: who asks for one must hear of it, and not get zeros."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: RemoteExperts) -> Tensor:
        return experts.service.experts(experts.layer).forward(hidden_TD, ids_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ConfigError("the experts of a cluster have no gradients: it serves, and does not train")


def _service_of(cluster: Any) -> Service:
    if hasattr(cluster, "directory"):  # a handle with the verbs of a cluster: it takes a client to call its layers
        from ray_moe.sdk import ClusterClient

        return ClusterClient(cluster)
    if not hasattr(cluster, "experts"):
        raise ConfigError(
            f"a cluster is what ray_moe.connect or ray_moe.MoEClient gives, found {type(cluster).__name__}"
        )
    return cluster


# ---- which module is which layer ----


def _note_layer(_parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Note the layer of every experts module of a model that is being built for us, and drop its parameters.

    A module does not know where it sits. It is put into its block once, when it is made, and the block's layer first
    into the list of all layers; what is put into a list later, a slice say, has been numbered by then.
    """
    if child is None:
        return
    if _is_experts(child):
        if getattr(child.config, "_experts_implementation", None) == EXPERTS_IMPLEMENTATION:
            child.ray_moe_layer = None  # type: ignore[assignment]  # to be numbered
            for parameter in list(child._parameters):
                child._parameters[parameter] = None
            child._is_hf_initialized = True  # type: ignore[assignment]  # there is nothing left to initialise
    elif name.isdigit():
        for module in child.modules():
            if _is_experts(module) and getattr(module, "ray_moe_layer", -1) is None:
                module.ray_moe_layer = int(name)  # type: ignore[assignment]


def _is_experts(module: nn.Module) -> bool:
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def _layer_of(module: nn.Module) -> int:
    layer: int | None = getattr(module, "ray_moe_layer", None)
    if layer is None:
        raise NotServingError(
            f"it is not known which layer {type(module).__name__} is: build its model after ray_moe.register, load it "
            "by ray_moe.load_trunk, or bind it by ray_moe.plugin.bind"
        )
    return layer
