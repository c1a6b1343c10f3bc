"""Random weights without files (`load_format: dummy`): a model of any size from its config.json alone.

Every value is a function of the tensor's name and the element's place in it, by integer arithmetic that is the same on
every device. So an expert has the same bits, and digest, on whichever rank or GPU it is made, and as often as it is
made: slots are filled, moved and verified as if there were files. Letters: E logical experts, D hidden, F ffn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from ray_moe.errors import ConfigError, UnsupportedModelError
from ray_moe.weights import sources
from ray_moe.weights.checkpoint import ExpertLayout, ExpertWeights, layout_of, read_config
from ray_moe.weights.sources import ExpertsModule

_MAKER = "ray_moe.dummy/1"  # another way to make the values is another checkpoint
_CHUNK = 2**20  # elements made at a time: temporaries are 8 bytes an element
_WORD = 0xFFFFFFFF
_BIAS_STD = 0.02


class DummyCheckpoint:
    """The routed experts of a model that has a configuration and no weights; `Checkpoint`'s interface.

    An expert is made on `device` whenever it is asked for. Its matrices have a standard deviation of one by the root of
    their inputs, so that activations keep their size through any number of layers.

    Raises what `read_config` and `describe_experts` raise.
    """

    def __init__(
        self, path: str | Path, *, device: torch.device | str = "cpu", trust_remote_code: bool = False
    ) -> None:
        self.path = Path(path)
        self.config: PretrainedConfig = read_config(self.path, trust_remote_code=trust_remote_code)
        self._device = torch.device(device)
        cls = sources.model_class(self.config, self.path, trust_remote_code)
        described = sources.describe_experts(sources.meta_model(self.config, cls))
        self._modules: Mapping[int, ExpertsModule] = {module.layer: module for module in described}
        counts = sorted({module.num_experts for module in described})
        if len(counts) > 1:
            raise UnsupportedModelError(self.config.model_type, f"its layers differ in experts: {counts}")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(sorted(self._modules))

    @property
    def num_experts(self) -> int:
        return self._modules[self.moe_layers[0]].num_experts

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the configuration and of the way in which values are made."""
        document = [_MAKER, json.loads((self.path / "config.json").read_text())]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def layout(self, layer: int) -> ExpertLayout:
        if layer not in self._modules:
            raise ConfigError(f"layer {layer} has no routed experts; the layers that have are {self.moe_layers}")
        return layout_of(self._modules[layer])

    def expert(self, layer: int, expert: int, *, dtype: torch.dtype | None = None) -> ExpertWeights:
        """Makes one expert, in float32 or in `dtype`. Raises ConfigError for a layer or an expert out of range."""
        layout = self.layout(layer)
        if not 0 <= expert < self.num_experts:
            raise ConfigError(f"expert {expert} of layer {layer}: the layer has experts 0 to {self.num_experts - 1}")
        tensors = {}
        for name, shape in layout.shapes.items():
            tensor = torch.empty(shape, dtype=dtype or torch.float32, device=self._device)
            std = _BIAS_STD if len(shape) == 1 else 1 / sqrt(shape[-1])
            tensors[name] = fill(tensor, f"layer {layer} expert {expert} {name}", std)
        return ExpertWeights(**tensors, has_gate=layout.has_gate)


def fill(tensor: Tensor, name: str, std: float) -> Tensor:
    """Overwrites a contiguous tensor with uniform values of mean 0 and standard deviation `std`, as `name` decides.

    Computed in float32 and rounded once to the tensor's dtype: bit-identical on every device.
    """
    flat = tensor.view(-1)
    places = _scrambled(torch.arange(min(_CHUNK, flat.numel()), device=tensor.device))
    bound = std * sqrt(3)
    for part, key in zip(flat.split(_CHUNK), _keys(name), strict=False):
        words = _scrambled(places[: part.numel()] ^ key)
        part.copy_(((words >> 8).to(torch.float32) * 2**-23 - 1) * bound)
    return tensor


def fill_model(model: PreTrainedModel, folder: Path, device: torch.device | str) -> None:
    """Gives a model without storage (on the meta device) its tensors on `device`, and values to all of them.

    Matrices are filled as `DummyCheckpoint` fills experts'. What transformers initialises otherwise keeps that: norms,
    biases, position encodings. Tokens that end a sequence are those of the folder's generation configuration, if any.
    """
    wider = model._get_dtype_plan(model.dtype)  # parts of names -> what the family wants them in
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        dtype = next((wanted for part, wanted in wider.items() if f".{part}." in f".{name}."), tensor.dtype)
        made = torch.empty_like(tensor, device=device, dtype=dtype)
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in module._parameters:
            made = torch.nn.Parameter(made, requires_grad=False)
            if made.ndim > 1:
                fill(made.data, name, 1 / sqrt(made.shape[-1]))
                made._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it as it is then
        setattr(module, leaf, made)
    own = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(own):  # some families draw a few of their vectors
        torch.manual_seed(0)
        model.initialize_weights()
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _keys(name: str) -> Iterator[int]:
    """A word for each chunk of the tensor of this name, without end."""
    number = 0
    while True:
        digest = hashlib.sha256(f"{_MAKER} {name} {number}".encode()).digest()
        yield int.from_bytes(digest[:4], "little")
        number += 1


def _scrambled(words: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64, after which neighbours have nothing in common.

    Two rounds of multiply and shift; both factors are below 2**31, so no product leaves int64.
    """
    words = words ^ (words >> 15)
    words = (words * 0x2C1B3C6D) & _WORD
    words ^= words >> 12
    words = (words * 0x297A2D39) & _WORD
    return words ^ (words >> 15)
