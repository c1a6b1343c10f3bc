"""Cluster configuration: the file that `ray-moe up` reads.

Every refusal is one `ConfigError` on one line that names the field, the value and the bound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, model_validator

from ray_moe.asked import BucketRequest, ReplicaRequest, parse_buckets, parse_replicas
from ray_moe.errors import ConfigError, PlacementError
from ray_moe.manifest import AsTuple, Manifest, Natural, Positive, TopologyManifest, read_yaml, shown
from ray_moe.relations import RuntimeTopology

# While a CPU peer serves: copying and digesting at full speed would take half a core from its steps.
CPU_FILL_BYTES_PER_S = 24e6
MOST_PEERS = 1024  # where a configuration gives no bound
# What can be chosen unit by unit: transports that need no group of their own, and every runner.
_CHOSEN_TRANSPORTS = ("all_to_all_v", "padded_all_to_all", "all_gather_filter")
_CHOSEN_RUNNERS = ("grouped", "capacity_padded", "block_sparse", "masked_decode")
# What carries rows between peers, by where these are.
_CPU_GROUPS, _CUDA_GROUPS = ("tcp", "gloo"), ("nccl",)
_RAREST_AUDIT = 1e-6  # of the steps
_Seconds = Annotated[float, Field(gt=0)]

# The five execution contracts that MoE systems went through (specification 0x00A), as choices of ours.
CONTRACTS: dict[str, dict[str, Any]] = {
    # Rows go to their experts' owners and back, one product per expert.
    "sparse_conditional": {"transport": "all_gather_filter", "runner": "grouped"},
    # Encode, all-to-all, local experts, all-to-all, decode.
    "expert_parallel": {"transport": "all_to_all_v", "runner": "capacity_padded"},
    # Regular buffers everywhere: fixed splits, capacity slots.
    "static_capacity": {"transport": "padded_all_to_all", "runner": "capacity_padded"},
    # Variable splits, no row dropped, no common capacity.
    "dropless": {"transport": "all_to_all_v", "runner": "block_sparse"},
    # Phase-specific: exact rows for prompts, persistent buffers and masked rows for decode.
    "low_latency": {
        "transport": "all_to_all_v",
        "runner": "grouped",
        "decode_buckets": [{"rank_tokens": 8, "slot_rows": 32}, {"rank_tokens": 32, "slot_rows": 128}],
    },
}


class AutopilotConfig(Manifest):
    """When the cluster changes itself, between `min_peers` and `max_peers`. Targets are for one rank; times seconds.

    It grows where tokens arriving, requests waiting or the time between tokens have been above target for
    `grow_after_s`, and shrinks where fewer ranks would be enough for `shrink_after_s`. Experts move where the fullest
    rank has carried `imbalance` times the mean for `move_after_s`. Between two changes lie `cool_down_s`.
    """

    tokens_per_s: Annotated[float, Field(gt=0)] = 1000.0
    waiting: Annotated[float, Field(gt=0)] = 4.0
    token_latency_s: _Seconds = 0.2
    unloaded_token_latency_s: Annotated[float, Field(ge=0)] = 0.0
    grow_after_s: Annotated[float, Field(ge=0)] = 10.0
    shrink_after_s: Annotated[float, Field(ge=0)] = 120.0
    move_after_s: Annotated[float, Field(ge=0)] = 30.0
    cool_down_s: Annotated[float, Field(ge=0)] = 30.0
    imbalance: Annotated[float, Field(gt=1)] = 1.3
    min_replicas: Positive = 1
    ranks: bool = True
    experts: bool = True


class ClusterConfig(Manifest):
    """Everything that `ray-moe up` decides. Times are seconds; `spare_slots` are per peer and MoE layer.

    `load_format` "dummy" reads the model's config.json alone and makes weights up. A peer may take `memory_bytes` of
    its device, by default `memory_fraction` of what is free there (on CPU, of its share of that); what does not fit is
    refused before anything is loaded, and `spare_slots` "auto" are as many as fit. `batch_invariant` (one GPU) gives
    rows of routed experts the same bits whatever they are batched with.

    `contract` names a historical combination and sets its fields. `node_labels` says per rank which node it belongs to
    (default: the Ray node that it runs on); `topology`, a document or the path of one, says more: relays, NICs,
    fabrics, and groups with their peer orders and epoch.

    `transport` fused_window lets the GPUs of one node write into one another's memory; what it cannot carry goes as
    all_to_all_v.

    `adaptive` lists combinations of transport and runner ("all_to_all_v+grouped,..."; "all"), of which every unit takes
    the one that has been cheapest for units like it.

    A cluster may grow to `max_peers` and shrink to `min_peers`, for which slot pools are sized (default: `peers`); it
    does so by itself with `autopilot`. Peers report what their routers asked for every `demand_every_steps` steps.
    `fill_bytes_per_s` caps what a peer reads into slots, or gives to others, while it serves (default: 24 MB/s on CPU).
    What the controller must remember lies in Ray's own store, or in `state_file`.

    What was counted is exported to Ray's metrics endpoints every `metrics_every_s`; 0 for never.
    Actors log to their stderr, with `log_json` a document a line. Spans of every `trace_every_steps`th step go where
    OpenTelemetry's environment variables say; 0 for none.

    Whoever calls a layer by itself has `call_lease_s` to fetch what it computed.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "default"
    model: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    trust_remote_code: bool = False
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    peers: Positive = 4
    spare_slots: Annotated[int | Literal["auto"], BeforeValidator(lambda given: _spare_from(given))] = 0
    replicas: Annotated[
        AsTuple[ReplicaRequest],
        BeforeValidator(lambda given: parse_replicas(given) if isinstance(given, str) else given),
    ] = ()
    cpus_per_peer: Annotated[float, Field(ge=0)] = 0.25
    min_peers: Positive | None = None
    max_peers: Positive | None = None
    fill_bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    autopilot: AutopilotConfig | None = None
    state_file: Annotated[str, Field(min_length=1)] | None = None

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    memory_bytes: Positive | None = None
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    kv_blocks: Positive = 512
    block_size: Positive = 16
    max_prefill_tokens: Positive = 256
    max_decode_rows: Positive = 64

    contract: Literal[tuple(CONTRACTS)] | None = None  # type: ignore[valid-type]
    group: Literal["tcp", "gloo", "nccl"] = "tcp"
    transport: Literal["all_to_all_v", "padded_all_to_all", "all_gather_filter", "hierarchical", "fused_window"] = (
        "all_to_all_v"
    )
    transport_chunks: Positive = 1
    node_labels: Annotated[
        AsTuple[Annotated[str, Field(min_length=1)]],
        BeforeValidator(lambda given: _labels(given) if isinstance(given, str) else given),
    ] = ()
    topology: Annotated[SerializeAsAny[TopologyManifest] | None, BeforeValidator(lambda given: _topology(given))] = None
    runner: Literal["grouped", "capacity_padded", "block_sparse", "masked_decode"] = "grouped"
    adaptive: Annotated[
        AsTuple[str],
        BeforeValidator(lambda given: _choices(given) if isinstance(given, str) else given),
        AfterValidator(lambda given: _known_choices(given)),
    ] = ()
    block_rows: Positive = 128
    batch_invariant: bool = False
    strategy: Literal["bulk", "chunk_pipeline", "shared_path", "microbatch_pipeline"] = "bulk"
    strategy_parts: Positive = 2
    payload: Literal["native", "fp8_row", "fp8_block"] = "native"
    gate_location: Literal["origin", "expert"] = "origin"
    decode_buckets: Annotated[
        AsTuple[BucketRequest],
        BeforeValidator(lambda given: parse_buckets(str(given)) if isinstance(given, str | int) else given),
    ] = ()
    policy: Literal["token_hash", "locality_first", "least_load", "round_robin", "queue_aware"] = "token_hash"

    step_deadline_s: _Seconds = 30.0
    start_deadline_s: _Seconds = 300.0
    request_deadline_s: _Seconds = 600.0
    call_lease_s: _Seconds = 60.0
    demand_every_steps: Natural = 32
    audit_rate: Annotated[float, Field(ge=0, le=1), AfterValidator(lambda given: _audit_rate(given))] = 1 / 256
    final_after_steps: Natural = 1
    # Ray forgets a gauge that is not renewed within twice its own report interval, which is 10 s by default.
    metrics_every_s: Annotated[float, Field(ge=0, le=10)] = 5.0
    trace_every_steps: Natural = 0
    log_json: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000

    @model_validator(mode="before")
    @classmethod
    def _fill_in_contract(cls, given: Any) -> Any:
        preset = CONTRACTS.get(str(given.get("contract"))) if isinstance(given, dict) else None
        if preset is None:
            return given
        for name, value in preset.items():
            if name in given and _plain(given[name]) != value:
                raise ValueError(f"contract {given['contract']!r} sets {name} to {value!r}, found {given[name]!r}")
        return {**given, **preset}

    @model_validator(mode="after")
    def _buckets_of_different_sizes(self) -> Self:
        sizes = [bucket.rank_tokens for bucket in self.decode_buckets]
        if len(set(sizes)) < len(sizes):
            raise ValueError(f"every decode bucket has its own rank_tokens, found {', '.join(map(str, sizes))}")
        return self

    @model_validator(mode="after")
    def _one_label_per_peer(self) -> Self:
        if self.node_labels and len(self.node_labels) != self.peers:
            raise ValueError(
                f"node_labels must name the node of each of {self.peers} peers, found {len(self.node_labels)}"
            )
        return self

    @model_validator(mode="after")
    def _topology_of_these_peers(self) -> Self:
        if self.topology is None:
            return self
        if self.node_labels:
            raise ValueError("node_labels and topology both say where ranks are; give one of them")
        ranks = sorted(rank for domain in self.topology.domains for rank in domain.member_ranks)
        if ranks != list(range(self.peers)):
            raise ValueError(f"topology must place ranks 0 to {self.peers - 1}, found {ranks}")
        try:
            self.topology.to_groups() if self.topology.groups else self.topology.to_topology()
        except PlacementError as error:  # a TopologyError is one
            raise ValueError(f"topology: {error}") from error
        return self

    @model_validator(mode="after")
    def _peers_in_bounds(self) -> Self:
        if not self.fewest_peers <= self.peers <= self.most_peers:
            raise ValueError(
                f"peers must be in [{self.fewest_peers}, {self.most_peers}] (min_peers, max_peers), found {self.peers}"
            )
        return self

    @property
    def fewest_peers(self) -> int:
        """Slot pools are sized so that so few peers hold all experts."""
        return self.peers if self.min_peers is None else self.min_peers

    @property
    def fill_cap(self) -> float | None:
        """Bytes per second; None for none, where copies take no time from the engine's processor."""
        if self.fill_bytes_per_s is None and self.device == "cpu":
            return CPU_FILL_BYTES_PER_S
        return self.fill_bytes_per_s

    @property
    def most_peers(self) -> int:
        return max(MOST_PEERS, self.peers) if self.max_peers is None else self.max_peers

    @model_validator(mode="after")
    def _carried(self) -> Self:
        if self.batch_invariant:
            # Whatever is not the layer's own kernels sums in an order that the batch decides; audits go by handles.
            needed: dict[str, object] = {"device": "cuda", "dtype": "bfloat16", "runner": "grouped"}
            needed |= {"payload": "native", "gate_location": "origin"}
            needed |= {"audit_rate": 0.0, "decode_buckets": (), "adaptive": ()}
            other = [f"{name}={getattr(self, name)}" for name, value in needed.items() if getattr(self, name) != value]
            if other:
                wanted = ", ".join(f"{name}={value}" for name, value in needed.items() if value != ())
                raise ValueError(
                    f"batch_invariant needs {wanted}, no decode_buckets and nothing adaptive; found {', '.join(other)}"
                )
        most = max(self.peers, self.max_peers or 1)
        if most > 1 and (self.group in _CUDA_GROUPS) != (self.device == "cuda"):
            carriers = _CUDA_GROUPS if self.device == "cuda" else _CPU_GROUPS
            raise ValueError(
                f"group must be {' or '.join(carriers)} for {most} peers on {self.device}, found {self.group}"
            )
        if self.transport == "fused_window":
            self._require_windows()
        return self

    def _require_windows(self) -> None:
        needed = {"device": "cuda", "group": "nccl", "transport_chunks": 1}
        other = [f"{name}={getattr(self, name)}" for name, value in needed.items() if getattr(self, name) != value]
        if self.dtype == "float32":
            other.append(f"dtype={self.dtype}")
        if other:
            raise ValueError(
                f"transport fused_window needs device=cuda, group=nccl, one transport chunk and half precision, "
                f"found {', '.join(other)}"
            )

    @property
    def window_peers(self) -> int:
        """How many peers windows are made for."""
        return max(self.peers, self.max_peers or 1)


def _choices(text: str) -> tuple[str, ...]:
    """ "a+b,c+d" as choices; an empty text gives none, "all" every one there is."""
    if text.strip() == "all":
        return tuple(f"{transport}+{runner}" for transport in _CHOSEN_TRANSPORTS for runner in _CHOSEN_RUNNERS)
    return tuple(choice.strip() for choice in text.split(",")) if text.strip() else ()


def _known_choices(given: tuple[str, ...]) -> tuple[str, ...]:
    for choice in given:
        transport, _, runner = choice.partition("+")
        if transport not in _CHOSEN_TRANSPORTS or runner not in _CHOSEN_RUNNERS:
            raise ValueError(
                f"found {choice!r}, must be TRANSPORT+RUNNER of {', '.join(_CHOSEN_TRANSPORTS)} and "
                f"{', '.join(_CHOSEN_RUNNERS)}"
            )
    if len(set(given)) < len(given) or len(given) == 1:
        raise ValueError(f"adaptive choices must be at least 2 and distinct, found {', '.join(given)}")
    return given


def _audit_rate(rate: float) -> float:
    if 0 < rate < _RAREST_AUDIT:
        raise ValueError(f"found {rate}, must be 0 or at least {_RAREST_AUDIT}")
    return rate


def _labels(text: str) -> tuple[str, ...]:
    """ "a,a,b,b" as labels; an empty text gives none."""
    return tuple(label.strip() for label in text.split(",")) if text.strip() else ()


def _topology(given: object) -> object:
    """A topology document, or the one that lies at a path; with relations it is a runtime's."""
    source = "topology"
    if isinstance(given, str):
        source = f"topology {given}"
        try:
            given = read_yaml(Path(given).read_text(encoding="utf-8"), given)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: cannot be read: {error}") from error
        if not isinstance(given, dict):
            raise ConfigError(f"{source}: a topology is a mapping of fields, found {type(given).__name__}")
    if isinstance(given, dict):
        kind = RuntimeTopology if "relations" in given else TopologyManifest
        return kind.parse(given, source)
    return given


def _plain(value: Any) -> Any:
    """A field's value as a document has it: buckets as a list of mappings, whichever way they were given."""
    if isinstance(value, str) and re.search(r"\d+\s*x\s*\d+", value):
        value = parse_buckets(value)
    if isinstance(value, list | tuple):
        return [item.model_dump() if isinstance(item, BucketRequest) else item for item in value]
    return value


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ClusterConfig:
    """Read a YAML (or JSON) file; `overrides` replace its fields, and the result is checked as one.

    Raises `ConfigError` naming the file, and the field, value and bound where the file could be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    values = read_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a cluster configuration is a mapping of fields, found {type(values).__name__}")
    return ClusterConfig.parse({**values, **(overrides or {})}, str(path))


def _spare_from(given: object) -> object:
    if given == "auto" or (type(given) is int and given >= 0):
        return given
    raise ValueError(f'found {shown(given)}, must be "auto" or a whole number greater than or equal to 0')
