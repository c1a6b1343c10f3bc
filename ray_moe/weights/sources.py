"""Which tensors on disk feed the parameters of a model's experts modules, as transformers' conversion mapping says.

No family and no key name is listed here. Every name in the checkpoint goes through the very function that transformers'
loader renames it with; what arrives at a parameter of an experts module is a source of that parameter, and the
converter's own operations, run on one expert's share of the sources, turn it into the parameter's row:

    model.layers.1.mlp.experts.7.gate_proj.weight  [F, D]     MergeModulelist(0), Concatenate(1)
    model.layers.1.mlp.experts.7.up_proj.weight    [F, D]     ------------------------------------>  gate_up_proj[7]
    model.layers.1.mlp.experts.gate_up_proj        [E, 2F, D] --------- (already the parameter) --->  gate_up_proj[7]

Letters: E logical experts, D hidden, F ffn.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ray_moe.errors import UnsupportedModelError


@dataclass(frozen=True)
class ExpertsModule:
    """The routed experts of one layer, as transformers' experts interface declares them.

    `shapes` maps a parameter (`gate_up_proj`, or `up_proj` without a gate; `down_proj`; `..._bias`) to its packed
    shape, which begins with E. The flags are those of `use_experts_implementation`.
    """

    layer: int
    name: str
    shapes: Mapping[str, tuple[int, ...]]
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool

    @property
    def up_name(self) -> str:
        return up_projection_name(self.has_gate)

    @property
    def num_experts(self) -> int:
        return self.shapes[self.up_name][0]


def up_projection_name(has_gate: bool) -> str:
    """The name that the experts interface gives to the first projection."""
    return "gate_up_proj" if has_gate else "up_proj"


def model_class(config: PretrainedConfig, folder: Path | None, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The causal language model class of `config`; code from the folder only when it is trusted."""
    reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if reference is not None and trust_remote_code and folder is not None:
        return get_class_from_dynamic_module(reference, str(folder))
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise UnsupportedModelError(config.model_type, "transformers has no causal language model class for it")
    return mapping[type(config)]


def meta_model(config: PretrainedConfig, cls: type[PreTrainedModel]) -> PreTrainedModel:
    """The model without weights: names, shapes and flags only."""
    with torch.device("meta"):
        return cls(copy.deepcopy(config))  # a model writes its attention choice into its configuration


def experts_modules(model: nn.Module) -> list[tuple[int, str, nn.Module]]:
    """(layer, name, module) of every module behind the experts interface, by layer.

    Raises UnsupportedModelError when there is none, or two in one layer.
    """
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    found: dict[int, tuple[int, str, nn.Module]] = {}
    for name, module in model.named_modules():
        if not (hasattr(module, "is_transposed") and hasattr(module, "has_gate")):
            continue
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if not numbers or numbers[-1] in found:
            raise UnsupportedModelError(family, f"cannot tell which layer the experts {name!r} belong to")
        found[numbers[-1]] = (numbers[-1], name, module)
    if not found:
        raise UnsupportedModelError(family, "it has no MoE block behind transformers' experts interface")
    return [found[layer] for layer in sorted(found)]


def describe_experts(model: PreTrainedModel) -> list[ExpertsModule]:
    """Names, shapes and flags of all experts modules of a (meta) model.

    Raises UnsupportedModelError when a module holds other parameters than the experts interface names.
    """
    described = []
    for layer, name, module in experts_modules(model):
        experts: Any = module
        shapes = {leaf: tuple(parameter.shape) for leaf, parameter in module.named_parameters()}
        expected = {up_projection_name(experts.has_gate), "down_proj"}
        if experts.has_bias:
            expected |= {f"{leaf}_bias" for leaf in expected}
        if set(shapes) != expected:
            reason = f"the experts {name!r} hold {sorted(shapes)}; the interface names {sorted(expected)}"
            raise UnsupportedModelError(model.config.model_type, reason)
        flags = {flag: bool(getattr(experts, flag)) for flag in _FLAGS}
        described.append(ExpertsModule(layer, name, shapes, **flags))
    return described


_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


@dataclass(frozen=True)
class ParameterSource:
    """The tensors on disk that feed one packed parameter `[E, ...]`.

    `keys` maps a source pattern to {expert id: name on disk}, or to {None: name} when the tensor on disk is stacked
    over the experts. Without a converter the one pattern is the parameter's own name.
    """

    parameter: str
    shape: tuple[int, ...]
    converter: WeightConverter | None
    keys: Mapping[str, Mapping[int | None, str]]

    @property
    def patterns(self) -> list[str]:
        return [self.parameter] if self.converter is None else self.converter.source_patterns

    def expert_keys(self, expert: int) -> dict[str, tuple[str, bool]]:
        """Pattern -> (name on disk, stacked over experts?) for one expert; a pattern without a tensor is left out."""
        found = {}
        for pattern in self.patterns:
            by_expert = self.keys.get(pattern, {})
            for expert_id in (expert, None):
                if expert_id in by_expert:
                    found[pattern] = (by_expert[expert_id], expert_id is None)
        return found

    def surplus_keys(self) -> list[str]:
        """Names on disk of experts that the parameter has no room for."""
        numbered = (item for by_expert in self.keys.values() for item in by_expert.items())
        return [key for expert, key in numbered if expert is not None and expert >= self.shape[0]]

    def expected_key(self, pattern: str, expert: int) -> str:
        """The name that an absent tensor would have, read off another expert's."""
        for other, key in self.keys.get(pattern, {}).items():
            head, _, tail = key.rpartition(f".{other}.")
            return f"{head}.{expert}.{tail}"
        return pattern.replace("*", str(expert))

    def assemble(self, tensors: Mapping[str, Tensor], config: PretrainedConfig) -> Tensor:
        """One expert's row of the parameter (shape `shape[1:]`) from its sources, by the converter's own operations.

        `tensors` maps each pattern to the expert's own tensor, or to a slice `[1, ...]` of a stacked one.
        """
        if self.converter is None:
            return tensors[self.parameter][0]
        converter = copy.deepcopy(self.converter)  # a converter collects its tensors in itself
        for pattern, tensor in tensors.items():
            collected: Any = tensor  # the loader hands in futures, the saver tensors; both are accepted
            converter.add_tensor(self.parameter, pattern, pattern, collected)
        (row,) = converter.convert(self.parameter, model=_OneExpert(self.shape), config=config).values()
        return (row[0] if isinstance(row, list) else row)[0]

    def source_shapes(self, config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
        """Pattern -> shape that one expert's share should have on disk, by the converter's reversed operations."""
        if self.converter is None:
            return {self.parameter: (1, *self.shape[1:])}
        target, sources = self.converter.target_patterns, self.converter.source_patterns
        tensors: Any = {target[0]: torch.empty((1, *self.shape[1:]), device="meta")}
        for operation in reversed(self.converter.operations):
            tensors = operation.reverse_op.convert(
                tensors,
                source_patterns=target,
                target_patterns=sources,
                model=_OneExpert(self.shape),
                full_layer_name=self.parameter,
                config=config,
            )
        return {pattern: tuple(tensors[pattern.replace("*", "0")].shape) for pattern in sources}


def find_sources(
    model: PreTrainedModel, experts: Iterable[ExpertsModule], keys: Iterable[str]
) -> dict[str, ParameterSource]:
    """Parameter name -> its sources among the names on disk; a parameter that nothing feeds has no entry.

    Raises UnsupportedModelError when a conversion mixes experts, so that one expert cannot be read alone.
    """
    shapes = {f"{module.name}.{leaf}": shape for module in experts for leaf, shape in module.shapes.items()}
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix

    found: dict[str, dict[str, dict[int | None, str]]] = {}
    for key in sorted(keys, key=dot_natural_key):  # the loader's order, on which lazily activated renamings depend
        parameter, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if parameter not in state and key in state:
            parameter, pattern = rename_source_key(key, [], [], prefix, state)
        if parameter not in shapes:
            continue
        expert = None
        if pattern is not None and "*" in pattern:
            renamed, _ = rename_source_key(key, renamings, [])
            expert = _expert_number(pattern, renamed, model.config.model_type)
        found.setdefault(parameter, {}).setdefault(parameter if pattern is None else pattern, {})[expert] = key

    sources = {}
    for parameter, by_source in found.items():
        owners = {id(by_pattern.get(pattern)): by_pattern.get(pattern) for pattern in by_source}
        if len(owners) > 1:
            reason = f"the checkpoint holds {parameter!r} in two layouts: {sorted(by_source)}"
            raise UnsupportedModelError(model.config.model_type, reason)
        (converter,) = owners.values()
        if converter is not None:
            _check_expert_local(converter, model.config.model_type)
        sources[parameter] = ParameterSource(parameter, shapes[parameter], converter, by_source)
    return sources


def candidate_patterns(model: PreTrainedModel, parameter: str) -> list[str]:
    """What could feed `parameter`: its own name, or the source patterns of the converters that end in it."""
    patterns = [parameter]
    for transform in get_model_conversion_mapping(model):
        if isinstance(transform, WeightConverter) and any(part in parameter for part in transform.target_patterns):
            patterns += transform.source_patterns
    return patterns


class _OneExpert:
    """Stands in for the model in operations that look at a parameter's shape: there is one expert."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.row = torch.empty((1, *shape[1:]), device="meta")

    def get_parameter(self, _name: str) -> Tensor:
        return self.row


# Which operations keep the experts apart once the expert axis 0 exists. By class name, for releases of transformers
# differ in which of them they have.
_KEEPS_EXPERTS_APART: dict[str, Callable[[Any], bool]] = {
    "MergeModulelist": lambda operation: operation.dim == 0,
    "Concatenate": lambda operation: operation.dim > 0 and operation.num_shards_attribute is None,
    "Interleave": lambda operation: operation.dim > 0,
    "Transpose": lambda operation: operation.dim0 > 0 and operation.dim1 > 0,
}


def _check_expert_local(converter: WeightConverter, family: str) -> None:
    per_expert = any("*" in pattern for pattern in converter.source_patterns)
    names = [type(operation).__name__ for operation in converter.operations]
    apart = all(
        name in _KEEPS_EXPERTS_APART and _KEEPS_EXPERTS_APART[name](operation)
        for name, operation in zip(names, converter.operations, strict=True)
    )
    merges = names[:1] == ["MergeModulelist"] if per_expert else "MergeModulelist" not in names
    if not (apart and merges and len(converter.target_patterns) == 1):
        reason = f"its conversion {converter.source_patterns} -> {converter.target_patterns} by {names} mixes experts"
        raise UnsupportedModelError(family, reason)


def _expert_number(pattern: str, key: str, family: str) -> int:
    match = re.search(pattern.replace("*.", r"(?P<expert>\d+)\.", 1), key)
    if match is None:
        raise UnsupportedModelError(family, f"no expert number in {key!r} where the mapping says {pattern!r}")
    return int(match["expert"])
