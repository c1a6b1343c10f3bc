"""One expert of one layer, straight from a checkpoint's safetensors files, in one representation for every family.

Letters: E logical experts, D hidden, F ffn.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, __version__

from ray_moe.errors import CheckpointError, ConfigError, UnsupportedModelError
from ray_moe.weights import sources
from ray_moe.weights.shards import INDEX_NAME, ShardIndex, read_index
from ray_moe.weights.sources import ExpertsModule, ParameterSource

# Attention that the paged engine computes exactly; what carries a recurrent state or an index of its own is not here.
SERVABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# These scale by the longest sequence of a forward, so a packed unit would change its neighbours' results.
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class ExpertLayout:
    """The shapes of one expert's weights, without the weights."""

    hidden: int  # D
    ffn: int  # F
    has_gate: bool = True
    has_bias: bool = False

    @property
    def up_rows(self) -> int:
        """Rows of the first projection: 2F with a gate, F without."""
        return 2 * self.ffn if self.has_gate else self.ffn

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of each tensor of ExpertWeights that is present -> its shape."""
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up": (self.up_rows, self.hidden),
            "down": (self.hidden, self.ffn),
        }
        if self.has_bias:
            shapes |= {"gate_up_bias": (self.up_rows,), "down_bias": (self.hidden,)}
        return shapes

    def nbytes(self, dtype: torch.dtype) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values()) * dtype.itemsize


@dataclass(frozen=True)
class ExpertWeights:
    """One expert's weights in the representation that every slot, copy and runner uses.

    All tensors are contiguous, of one dtype and on one device, in `torch.nn.functional.linear` layout.
    gate_up [2F, D]: the gate's rows first, then up's, never interleaved; [F, D] (up alone) when `has_gate` is False.
    down [D, F]. gate_up_bias [2F] (or [F]) and down_bias [D]: both or neither.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    has_gate: bool = True

    def __post_init__(self) -> None:
        found = {name: tuple(tensor.shape) for name, tensor in self.named_tensors()}
        if self.gate_up.ndim != 2 or self.down.ndim != 2 or found != self.layout.shapes:
            raise ConfigError(f"expert weights {found} do not fit together (has_gate={self.has_gate})")
        for name, tensor in self.named_tensors():
            if not tensor.is_contiguous() or (tensor.dtype, tensor.device) != (self.dtype, self.gate_up.device):
                raise ConfigError(
                    f"expert weights {name}: expected contiguous {self.dtype} on {self.gate_up.device}, found "
                    f"strides {tensor.stride()}, {tensor.dtype} on {tensor.device}"
                )

    @property
    def layout(self) -> ExpertLayout:
        rows, hidden = self.gate_up.shape
        has_bias = self.gate_up_bias is not None or self.down_bias is not None
        return ExpertLayout(hidden, rows // 2 if self.has_gate else rows, self.has_gate, has_bias)

    @property
    def dtype(self) -> torch.dtype:
        return self.gate_up.dtype

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of the tensors that are present, in their canonical order."""
        named = [(name, getattr(self, name)) for name in ("gate_up", "down", "gate_up_bias", "down_bias")]
        return [(name, tensor) for name, tensor in named if tensor is not None]

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> ExpertWeights:
        changes: dict[str, Any] = {name: tensor.to(device=device, dtype=dtype) for name, tensor in self.named_tensors()}
        return replace(self, **changes)


class Checkpoint:
    """The routed experts of a sharded or single safetensors checkpoint, one at a time.

    Everything that headers can tell is checked at construction, so that a bad checkpoint is refused before any slot is
    filled. Reading one expert never reads another's bytes, and it may be done from several threads.

    Args:
        path: the model's folder (see `resolve_model` for hub ids).
        dtype: what the expert tensors must be on disk; the configuration's dtype when not given.
        trust_remote_code: run modelling code that lies in the folder.

    Raises:
        ConfigError: no model folder. UnsupportedModelError: quantised weights, or no experts interface.
        CheckpointError: a tensor is missing, truncated, or of another shape or dtype than the configuration asks for.
    """

    def __init__(self, path: str | Path, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> None:
        self.path = Path(path)
        self.config = read_config(self.path, trust_remote_code=trust_remote_code)
        _refuse_quantised(self.config)
        cls = sources.model_class(self.config, self.path, trust_remote_code)
        model = sources.meta_model(self.config, cls)
        self._index: ShardIndex = read_index(self.path)
        self._modules = {module.layer: module for module in sources.describe_experts(model)}
        self._sources = sources.find_sources(model, self._modules.values(), self._index.tensors)
        self._dtype = dtype or _declared_dtype(self.config)
        self._files: dict[Path, Any] = {}
        self._files_lock = threading.Lock()
        self._wrong_patterns: dict[tuple[object, ...], dict[str, tuple[int, ...]]] = {}
        counts = {module.num_experts for module in self._modules.values()}
        if len(counts) > 1:
            raise UnsupportedModelError(self.config.model_type, f"its layers differ in experts: {sorted(counts)}")
        for module in self._modules.values():
            self._verify(module, model)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have routed experts; dense layers are not among them."""
        return tuple(sorted(self._modules))

    @property
    def num_experts(self) -> int:
        return self._modules[self.moe_layers[0]].num_experts

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the expert tensors on disk."""
        assert self._dtype is not None  # construction took it from the first tensor, had nobody declared it
        return self._dtype

    @property
    def identity(self) -> str:
        """Names this checkpoint: SHA-256 (see ShardIndex); it differs between the two layouts of equal weights."""
        return self._index.identity

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the dtype on disk (the largest, should layers differ)."""
        return max(self.layout(layer).nbytes(self.dtype) for layer in self.moe_layers)

    def shape(self, layer: int) -> tuple[int, int]:
        """(D, F) of the layer's experts."""
        layout = self.layout(layer)
        return layout.hidden, layout.ffn

    def layout(self, layer: int) -> ExpertLayout:
        return layout_of(self._module(layer))

    def expert(self, layer: int, expert: int, *, dtype: torch.dtype | None = None) -> ExpertWeights:
        """Reads one expert to host memory, cast to `dtype` if one is given.

        Raises ConfigError for a layer or an expert out of range, CheckpointError when the file cannot be read any more.
        """
        module = self._module(layer)
        if not 0 <= expert < module.num_experts:
            raise ConfigError(f"expert {expert} of layer {layer}: the layer has experts 0 to {module.num_experts - 1}")
        rows = {leaf: self._row(self._sources[f"{module.name}.{leaf}"], expert) for leaf in module.shapes}
        weights = _canonical(module, rows)
        return weights if dtype is None else weights.to(dtype=dtype)

    def _module(self, layer: int) -> ExpertsModule:
        if layer not in self._modules:
            raise ConfigError(f"layer {layer} has no routed experts; the layers that have are {self.moe_layers}")
        return self._modules[layer]

    def _row(self, source: ParameterSource, expert: int) -> Tensor:
        tensors = {
            pattern: self._read(key, expert if stacked else None)
            for pattern, (key, stacked) in source.expert_keys(expert).items()
        }
        return source.assemble(tensors, self.config)

    def _read(self, key: str, expert: int | None) -> Tensor:
        """The tensor, or only the slice `[1, ...]` of one expert."""
        stored = self._index.tensors[key]
        try:
            with self._files_lock:
                if stored.file not in self._files:
                    self._files[stored.file] = safe_open(stored.file, framework="pt")
            file = self._files[stored.file]
            if expert is None:
                return file.get_tensor(key)
            return file.get_slice(key)[expert : expert + 1].clone()  # a slice still maps the file
        except (OSError, SafetensorError) as error:
            expected = f"{stored.dtype} {stored.shape} as when the checkpoint was opened"
            raise CheckpointError(str(stored.file), key, expected, repr(error)) from error

    def _verify(self, module: ExpertsModule, model: Any) -> None:
        for leaf in module.shapes:
            source = self._sources.get(f"{module.name}.{leaf}")
            if source is None:
                patterns = sources.candidate_patterns(model, f"{module.name}.{leaf}")
                raise CheckpointError(str(self.path), f"{module.name}.{leaf}", f"one of {patterns}", "no such tensor")
            for surplus in source.surplus_keys():
                file = str(self._index.tensors[surplus].file)
                raise CheckpointError(file, surplus, f"experts 0 to {module.num_experts - 1}", "one expert more")
            for expert in range(module.num_experts):
                self._verify_row(source, expert)

    def _verify_row(self, source: ParameterSource, expert: int) -> None:
        keys = source.expert_keys(expert)
        for pattern in source.patterns:
            if pattern not in keys:
                key = source.expected_key(pattern, expert)
                raise CheckpointError(self._index_file(), key, f"a tensor of expert {expert}", "no such tensor")
            self._verify_dtype(keys[pattern][0])
        found = {pattern: self._index.tensors[key].shape for pattern, (key, _) in keys.items()}
        signature = (id(source.converter), source.shape, tuple(found.items()))
        if signature not in self._wrong_patterns:  # experts share their shapes, so this runs a handful of times
            stacked = {pattern for pattern, (_, is_stacked) in keys.items() if is_stacked}
            self._wrong_patterns[signature] = _wrong_shapes(source, found, stacked, self.config)
        for pattern, expected in self._wrong_patterns[signature].items():
            key, _ = keys[pattern]
            file = str(self._index.tensors[key].file)
            raise CheckpointError(file, key, f"shape {expected}", f"shape {found[pattern]}")

    def _verify_dtype(self, key: str) -> None:
        stored = self._index.tensors[key]
        found = DTYPES.get(stored.dtype)
        if self._dtype is None:
            self._dtype = found
        if found is None or found != self._dtype:
            raise CheckpointError(str(stored.file), key, f"dtype {self._dtype}", f"dtype {found or stored.dtype}")

    def _index_file(self) -> str:
        index = self.path / INDEX_NAME
        return str(index if index.is_file() else self.path)


def layout_of(module: ExpertsModule) -> ExpertLayout:
    """The canonical layout of the module's experts."""
    first, second = module.shapes[module.up_name][1:]
    rows, hidden = (second, first) if module.is_transposed else (first, second)
    return ExpertLayout(hidden, rows // 2 if module.has_gate else rows, module.has_gate, module.has_bias)


def _wrong_shapes(
    source: ParameterSource, found: dict[str, tuple[int, ...]], stacked: set[str], config: PretrainedConfig
) -> dict[str, tuple[int, ...]]:
    """The patterns whose shapes on disk do not give the parameter, with the shapes that would; empty if all is well."""
    count = source.shape[0]
    if all(found[pattern][:1] == (count,) for pattern in stacked):
        one = {pattern: (1, *shape[1:]) if pattern in stacked else shape for pattern, shape in found.items()}
        tensors = {pattern: torch.empty(shape, device="meta") for pattern, shape in one.items()}
        try:
            if tuple(source.assemble(tensors, config).shape) == source.shape[1:]:
                return {}
        except (RuntimeError, IndexError):  # torch's word for shapes that do not go together
            pass
    expected = {
        pattern: (count, *shape[1:]) if pattern in stacked else shape
        for pattern, shape in source.source_shapes(config).items()
    }
    return {pattern: shape for pattern, shape in expected.items() if shape != found[pattern]}


def _canonical(module: ExpertsModule, rows: dict[str, Tensor]) -> ExpertWeights:
    """From the module's own layout of one expert to ours."""

    def upright(tensor: Tensor) -> Tensor:
        return (tensor.mT if module.is_transposed and tensor.ndim == 2 else tensor).contiguous()

    def gate_first(tensor: Tensor) -> Tensor:
        interleaved = module.has_gate and not module.is_concatenated
        return torch.cat((tensor[0::2], tensor[1::2])) if interleaved else tensor

    up, bias = rows[module.up_name], rows.get(f"{module.up_name}_bias")
    return ExpertWeights(
        gate_up=gate_first(upright(up)),
        down=upright(rows["down_proj"]),
        gate_up_bias=None if bias is None else gate_first(upright(bias)),
        down_bias=None if bias is None else upright(rows["down_proj_bias"]),
        has_gate=module.has_gate,
    )


def read_config(path: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's configuration.

    Raises ConfigError when the folder holds none or it needs code that is not trusted, UnsupportedModelError when
    transformers does not know the model type.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} is not a model folder: it has no config.json")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    family = str(raw.get("model_type"))
    if family not in CONFIG_MAPPING:
        if not raw.get("auto_map"):
            raise UnsupportedModelError(family, f"transformers {__version__} does not know this model type")
        if not trust_remote_code:
            raise ConfigError(f"{file}: model type {family!r} runs code of its own; set trust_remote_code to allow it")
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def check_supported(config: PretrainedConfig, *, path: Path | None = None, trust_remote_code: bool = False) -> None:
    """Refuses a family that cannot be served exactly, before anything is loaded.

    Raises UnsupportedModelError naming the family and the reason.
    """
    family = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModelError(family, "it is an encoder-decoder, not a decoder-only language model")
    _refuse_quantised(config)
    layer_types: Sequence[str] = getattr(config.get_text_config(), "layer_types", None) or ()
    unservable = sorted(set(layer_types) - SERVABLE_LAYER_TYPES)
    if unservable:
        reason = f"its layer_types contain {unservable}; the paged engine serves {sorted(SERVABLE_LAYER_TYPES)}"
        raise UnsupportedModelError(family, reason)
    scaling = sorted(_rope_types(config) & BATCH_DEPENDENT_ROPE)
    if scaling:
        raise UnsupportedModelError(family, f"its position encoding ({scaling[0]}) depends on what shares the batch")
    cls: Any = sources.model_class(config, path, trust_remote_code)
    if cls._is_stateful or not cls._supports_attention_backend:
        raise UnsupportedModelError(family, "its layers do not all attend through transformers' attention interface")
    sources.describe_experts(sources.meta_model(config, cls))


def _declared_dtype(config: PretrainedConfig) -> torch.dtype | None:
    for holder in (config, config.get_text_config()):
        dtype = getattr(torch, holder.dtype) if isinstance(holder.dtype, str) else holder.dtype
        if isinstance(dtype, torch.dtype):
            return dtype
    return None


def _rope_types(config: PretrainedConfig) -> set[str]:
    """Every rope type that the configuration names; some families have one per layer type."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(one["rope_type"]) for one in each if "rope_type" in one}


def _refuse_quantised(config: PretrainedConfig) -> None:
    quantisation = getattr(config, "quantization_config", None)
    if quantisation:
        get = quantisation.get if isinstance(quantisation, dict) else lambda name: getattr(quantisation, name, None)
        raise UnsupportedModelError(config.model_type, f"its weights are quantised ({get('quant_method')})")


def resolve_model(path_or_hub_id: str | Path, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of a model: the path itself, or the hub's snapshot of that id (downloaded, or taken from the cache).

    Raises ConfigError when it is neither a model folder nor a hub id that can be resolved.
    """
    folder = Path(path_or_hub_id).expanduser()
    if not folder.is_dir():
        try:
            files = ["*.json", "*.jinja", "*.model", "*.txt", "*.py", *(["*.safetensors"] if weights else [])]
            # Offline, a pinned commit is taken from the cache only when told so; a branch or tag falls back by itself.
            offline = constants.HF_HUB_OFFLINE
            name = str(path_or_hub_id)
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=files, local_files_only=offline))
        except (HFValidationError, httpx.HTTPError, OSError) as error:  # the hub's own errors are OSErrors
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            at = "" if revision is None else f" at revision {revision!r}"
            raise ConfigError(
                f"{str(path_or_hub_id)!r}{at} is neither a folder nor a hub model that can be fetched: {reason}"
            ) from error
    elif revision is not None:
        raise ConfigError(f"revision {revision!r} needs a hub id; {folder} is a folder")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    return folder
