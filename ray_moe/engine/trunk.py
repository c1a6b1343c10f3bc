"""The trunk: a transformers model without its routed experts, whose MoE blocks call whatever is bound to them.

Attention, norms, router gates, shared experts and the head are transformers' own code and weights. The experts modules
stay in place for their flags and activation, but hold no parameters, so that their tensors are never read from disk.
Their forward reaches us through transformers' experts interface under the name `ray_moe`. That registry is
process-wide, so what computes the experts hangs on each module (`module.ray_moe`).

Letters: T tokens, K top-k, R rows, D hidden, F ffn.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ray_moe.errors import CheckpointError, ConfigError, NotServingError, UnsupportedModelError
from ray_moe.kernels.activation import SwiGLU
from ray_moe.weights.checkpoint import check_supported, read_config
from ray_moe.weights.dummy import fill_model
from ray_moe.weights.shards import read_index
from ray_moe.weights.sources import experts_modules, meta_model, model_class

EXPERTS_IMPLEMENTATION = "ray_moe"

# (hidden_TD, topk_ids_TK, topk_weights_TK) -> out_TD, the gate applied; the weights come in the router's own dtype.
Binding = Callable[[Tensor, Tensor, Tensor], Tensor]
# Rows [R, 2F] of the first projection (gate columns first; [R, F] without a gate) -> [R, F].
Activation = Callable[[Tensor], Tensor]


def bound_experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The `ray_moe` experts implementation; argument names are those of transformers' own implementations.

    Raises NotServingError when nothing is bound to the module.
    """
    binding: Binding | None = getattr(self, "ray_moe", None)
    if binding is None:
        where = getattr(self, "ray_moe_name", type(self).__name__)
        raise NotServingError(f"experts module {where!r} has no binding: set its `ray_moe` attribute before a forward")
    return binding(hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, bound_experts_forward)


@dataclass(frozen=True)
class Trunk:
    """A trunk: `experts` maps each MoE layer to its parameterless experts module, `top_k` is routes per token."""

    model: PreTrainedModel
    config: PretrainedConfig
    experts: Mapping[int, nn.Module]
    top_k: int
    _forms: dict[int, SwiGLU | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def bind(self, make_binding: Callable[[int, nn.Module], Binding]) -> None:
        """Binds what `make_binding(layer, module)` returns to every MoE layer, in place of any earlier binding."""
        for layer, module in self.experts.items():
            module.ray_moe = make_binding(layer, module)  # type: ignore[assignment]

    def activation(self, layer: int) -> Activation:
        """The layer's activation over canonical rows; ConfigError when the layer has no routed experts."""
        return experts_activation(self._experts_of(layer))

    def activation_form(self, layer: int) -> SwiGLU | None:
        """The same activation in numbers, for kernels; None where it has no such form. ConfigError as `activation`."""
        if layer not in self._forms:  # it is a property of the model: generations come and go
            self._forms[layer] = activation_form(self._experts_of(layer))
        return self._forms[layer]

    def _experts_of(self, layer: int) -> nn.Module:
        if layer not in self.experts:
            raise ConfigError(f"layer {layer} has no routed experts; the layers that have are {tuple(self.experts)}")
        return self.experts[layer]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(self.experts)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the trunk holds."""
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers()))

    @property
    def vocab_size(self) -> int:
        return int(self._text_config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self._text_config.hidden_size)

    @property
    def max_positions(self) -> int:
        """The longest sequence that the model's position encoding is made for."""
        return int(self._text_config.max_position_embeddings)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence: the generation configuration's, else the model configuration's; may be empty."""
        for config in (self.model.generation_config, self._text_config):
            ids = getattr(config, "eos_token_id", None)
            if ids is not None:
                return (ids,) if isinstance(ids, int) else tuple(ids)
        return ()

    @property
    def trunk_parameter_names(self) -> tuple[str, ...]:
        """Every tensor that the trunk holds; no routed expert's is among them."""
        return tuple(self.model.state_dict())

    @property
    def _text_config(self) -> PretrainedConfig:
        return self.config.get_text_config()


def experts_activation(experts: nn.Module) -> Activation:
    """The module's own activation, clamps and all, over rows in our canonical column order (gate first, then up)."""
    module: Any = experts
    if not module.has_gate:
        return module.act_fn
    if module.is_concatenated:
        return module._apply_gate

    def interleaved(rows_R2F: Tensor) -> Tensor:
        gate_RF, up_RF = rows_R2F.chunk(2, dim=-1)
        return module._apply_gate(torch.stack((gate_RF, up_RF), dim=-1).flatten(-2))

    return interleaved


def activation_form(experts: nn.Module) -> SwiGLU | None:
    """The `SwiGLU` with the values of the module's own activation, in fp32, beyond every clamp; None if there is none.

    A module's `limit` and `alpha` only say what to try: the values decide, never a name.
    """
    module: Any = experts
    if not module.has_gate:
        return None
    candidates = [SwiGLU()]
    limit, alpha = (getattr(module, name, None) for name in ("limit", "alpha"))
    if isinstance(limit, int | float) and isinstance(alpha, int | float):
        candidates.append(SwiGLU(float(limit), float(alpha), 1.0))
    # On the host where the module allows it: nobody waits for the device.
    held = next(itertools.chain(experts.parameters(), experts.buffers()), None)
    samples = torch.cat((torch.linspace(-30, 30, 241), torch.tensor([-1e4, -1e3, -1e2, 1e2, 1e3, 1e4])))
    rows_R2 = torch.cartesian_prod(samples, samples).to("cpu" if held is None else held.device)
    gate_R1, up_R1 = rows_R2.split(1, dim=1)
    with torch.no_grad():
        own_R1 = experts_activation(experts)(rows_R2)
        for candidate in candidates:
            if torch.allclose(own_R1, candidate(gate_R1, up_R1), rtol=1e-5, atol=1e-6):
                return candidate
    return None


def load_trunk(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    attn_implementation: str,
    trust_remote_code: bool = False,
    load_format: str = "safetensors",
) -> Trunk:
    """Loads everything except the routed experts from a model folder, in evaluation mode and without gradients.

    `attn_implementation` is a name in transformers' attention registry; register your own before the call. With
    `load_format` "dummy" only the configuration is read, and the tensors are made on `device` (`weights.dummy`).

    Raises:
        ConfigError: no model folder, untrusted code, or an attention implementation that nobody registered or that the
            family does not take.
        UnsupportedModelError: a family that cannot be served exactly; nothing has been loaded then.
        CheckpointError: a shard is truncated, or a tensor of the trunk is missing or of another shape.
    """
    folder = Path(path)
    config = read_config(folder, trust_remote_code=trust_remote_code)
    check_supported(config, path=folder, trust_remote_code=trust_remote_code)
    cls = model_class(config, folder, trust_remote_code)
    _check_attention(cls, config, attn_implementation)
    if load_format == "dummy":
        model = trunk_skeleton(config, cls, dtype, attn_implementation)
        fill_model(model, folder, device)
    else:
        model = _read_trunk(folder, config, cls, dtype, attn_implementation, torch.device(device))
    model.requires_grad_(False).eval().to(device)
    fuse_on(device, model)
    experts = {}
    for layer, name, module in experts_modules(model):
        module.layer_idx, module.ray_moe_name = layer, name  # type: ignore[assignment]
        experts[layer] = module
    return Trunk(model, model.config, experts, top_k_of(model))


def fuse_on(device: torch.device | str, model: PreTrainedModel) -> None:
    """The trunk's small operations by kernels, where kernels run."""
    if torch.device(device).type != "cuda":
        return
    try:
        from ray_moe.engine.fused_trunk import fuse
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        return
    fuse(model)


def trunk_skeleton(
    config: PretrainedConfig, cls: type[PreTrainedModel], dtype: torch.dtype, attn_implementation: str
) -> Any:
    """The trunk on the meta device: modules and shapes, no storage."""
    with torch.device("meta"):
        return _trunk_class(cls)._from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attn_implementation,
            experts_implementation=EXPERTS_IMPLEMENTATION,
        )


def _read_trunk(
    folder: Path,
    config: PretrainedConfig,
    cls: type[PreTrainedModel],
    dtype: torch.dtype,
    attn_implementation: str,
    device: torch.device,
) -> Any:
    read_index(folder)  # a truncated shard is named here; the loader below would only say that a header is invalid
    model, report = _trunk_class(cls, device).from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        experts_implementation=EXPERTS_IMPLEMENTATION,
        attn_implementation=attn_implementation,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # reported below with both shapes
        local_files_only=True,
        output_loading_info=True,
    )
    _check_complete(folder, report)
    return model


def top_k_of(model: PreTrainedModel) -> int:
    """Routes per token: as the routers beside the experts say, else as the configuration does."""
    found = set()
    for _, name, _ in experts_modules(model):
        block = model.get_submodule(name.rpartition(".")[0])
        routers = (getattr(module, "top_k", None) for module in block.modules())
        found |= {next((int(value) for value in routers if isinstance(value, int)), None)}
    config = model.config.get_text_config()
    if found == {None}:
        found = {getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)}
    top_k = found.pop()
    if found or top_k is None:
        raise UnsupportedModelError(model.config.model_type, "its layers do not name one number of routes per token")
    return top_k


def _trunk_class(cls: type[PreTrainedModel], device: torch.device | None = None) -> Any:
    """`cls` without its routed experts' parameters; with a `device`, tensors of a checkpoint go there one by one.

    The name and module stay: transformers finds conversions by the one and tells custom code by the other. Its own way
    to name a device takes another package, for models that lie on several; the plan for one is read where it loads.
    """

    def __init__(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        for _, name, module in experts_modules(self):
            for leaf in list(module._parameters):
                module._parameters[leaf] = None
                self._keys_to_ignore_on_load_unexpected.add(f"{name}.{leaf}".replace(".", r"\."))
            module._is_hf_initialized = True  # type: ignore[assignment]  # there is nothing left to initialise

    def load(model: Any, state_dict: Any, files: Any, load_config: Any, **more: Any) -> Any:
        there = replace(load_config, device_map={"": device})
        return cls._load_pretrained_model(model, state_dict, files, there, **more)

    members: dict[str, Any] = {"__init__": __init__, "__module__": cls.__module__}
    if device is not None and device.type != "cpu":
        members["_load_pretrained_model"] = staticmethod(load)
    return type(cls.__name__, (cls,), members)


def _check_attention(cls: type[PreTrainedModel], config: PretrainedConfig, name: str) -> None:
    if name != "eager" and name not in ALL_ATTENTION_FUNCTIONS:
        known = ["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())]
        raise ConfigError(f"attention implementation {name!r} is not registered; known: {known}")
    candidate = copy.deepcopy(config)
    candidate._attn_implementation = name
    try:
        meta_model(candidate, cls)
    except (ValueError, ImportError) as error:  # how transformers says that a family or this host lacks it
        raise ConfigError(f"{config.model_type} cannot use attention implementation {name!r}: {error}") from error


def _check_complete(folder: Path, report: Mapping[str, Any]) -> None:
    """The loader fills a tensor that it does not find with random numbers and goes on; a server must not."""
    for key in sorted(report["missing_keys"]):
        raise CheckpointError(str(folder), key, "a tensor of the trunk", "no such tensor")
    for key, found, expected in sorted(report["mismatched_keys"], key=str):
        raise CheckpointError(str(folder), key, f"shape {tuple(expected)}", f"shape {tuple(found)}")
    for message in report["error_msgs"]:
        raise CheckpointError(str(folder), "trunk", "tensors that load", str(message))
