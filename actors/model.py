"""One checkpoint as one peer has it: the trunk, what probing it found, the files of its experts, and the facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from ray_moe.actors.bringup import check_choices
from ray_moe.config import ClusterConfig
from ray_moe.dataplane.graphs import dtype_name
from ray_moe.engine.blocks import BlockFacts, probe_blocks
from ray_moe.engine.records import ModelFacts
from ray_moe.engine.scheduler import Scheduler
from ray_moe.engine.trunk import Trunk, load_trunk
from ray_moe.weights.formats import ExpertSource, open_experts


@dataclass(frozen=True)
class LoadedModel:
    """`blocks` by MoE layer, as probed. Experts come from `checkpoint` when they are needed; `path` is the folder."""

    trunk: Trunk
    blocks: Mapping[int, BlockFacts]
    checkpoint: ExpertSource
    facts: ModelFacts
    path: Path


def load_model(config: ClusterConfig, path: Path) -> LoadedModel:
    """Load a trunk and open its checkpoint; no expert is read.

    Raises what `load_trunk` and `open_experts` raise. Whether it fits is the caller's to ask before (`memory`).
    """
    disable_progress_bar()  # whoever starts the cluster draws its own
    trunk = load_trunk(
        path,
        dtype=getattr(torch, config.dtype),
        device=config.device,
        attn_implementation="ray_moe",
        trust_remote_code=config.trust_remote_code,
        load_format=config.load_format,
    )
    check_choices(config, trunk.hidden_size)
    blocks = probe_blocks(trunk)
    checkpoint = open_experts(
        path, config.load_format, device=config.device, trust_remote_code=config.trust_remote_code
    )
    facts = ModelFacts(
        checkpoint_version=checkpoint.identity,
        moe_layers=checkpoint.moe_layers,
        num_experts=checkpoint.num_experts,
        expert_bytes=max(checkpoint.layout(layer).nbytes(trunk.dtype) for layer in checkpoint.moe_layers),
        vocab_size=trunk.vocab_size,
        max_positions=trunk.max_positions,
        gate_dtype=dtype_name(next(iter(blocks.values())).gate),
        trunk_parameters=sum(parameter.numel() for parameter in trunk.model.parameters()),
        hidden_size=trunk.hidden_size,
        top_k=trunk.top_k,
    )
    return LoadedModel(trunk, blocks, checkpoint, facts, path)


def scheduler_of(config: ClusterConfig, trunk: Trunk) -> Scheduler:
    """The scheduler of a peer's engine."""
    return Scheduler(
        num_blocks=config.kv_blocks,
        block_size=config.block_size,
        max_prefill_tokens=config.max_prefill_tokens,
        max_decode_rows=config.max_decode_rows,
        max_positions=trunk.max_positions,
        vocab_size=trunk.vocab_size,
        device=config.device,
    )
