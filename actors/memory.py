"""Whether a model fits, before anything of it is loaded: peers say what is free, `weights.budget` has the sums."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from ray_moe.actors.device import most_tokens, regions_of, runs_kernels
from ray_moe.asked import expand_replicas
from ray_moe.config import ClusterConfig
from ray_moe.controlplane.solve import balanced, pool_capacity
from ray_moe.engine.decode_graph import decode_sizes
from ray_moe.engine.needs import model_needs
from ray_moe.errors import ConfigError, NotAvailableError
from ray_moe.identity import GlobalRank
from ray_moe.kernels.regions import workspace_nbytes
from ray_moe.weights.budget import Budget, ModelNeeds, Sizes, require_fit, spare_that_fits

_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Room:
    """Bytes that are free for one peer, or for all peers of its node where these share one memory."""

    node: str
    free: int


def room_on(node: str, device: str) -> Room:
    """What is free now on this process's device. On CUDA that takes a context, which is then no longer free."""
    return Room(node, torch.cuda.mem_get_info()[0] if device == "cuda" else _free_on_host())


def spare_slots(config: ClusterConfig, model: Path, rooms: Mapping[int, Room]) -> int:
    """Spare slots per layer of a new cluster: as configured, or for "auto" as many as fit on every rank.

    `rooms` by rank, all of them before any rank has loaded anything. Raises `ConfigError` with the sums of a rank that
    the model does not fit on.
    """
    needs, sizes = _sizes(config, model)
    sharers = Counter(room.node for room in rooms.values()) if config.device == "cpu" else Counter[str]()
    budgets = {rank: _budget(config, room.free, sharers[room.node] or 1) for rank, room in rooms.items()}
    if config.spare_slots == "auto":
        sizes = replace(sizes, spare=min(spare_that_fits(needs, sizes, budget) for budget in budgets.values()))
    for rank, budget in budgets.items():
        require_fit(needs, sizes, budget, f"rank {rank}")
    return sizes.spare


def require_room(
    config: ClusterConfig, model: Path, capacity: int | None, *, who: str, sharers: int = 1, held: int = 0
) -> None:
    """What is free here now takes a trunk and, with a `capacity`, that many slots per layer and a KV cache.

    On a CPU `sharers` peers of this machine, this one among them, ask for as much at the same time: none of them may
    take what another will. `held` bytes are this peer's already, and count against a `memory_bytes`. Raises
    `NotAvailableError` with the sums of `who`: others serve, and go on.
    """
    free = room_on("", config.device).free
    needs, sizes = _sizes(config, model)
    slots, kv_blocks = (0, 0) if capacity is None else (capacity, sizes.kv_blocks)
    sizes = replace(sizes, held=slots, spare=0, kv_blocks=kv_blocks)
    budget = _budget(config, free, sharers if config.device == "cpu" else 1)
    if config.memory_bytes is not None and (left := max(0, config.memory_bytes - held)) < budget.nbytes:
        budget = Budget(left, f"memory_bytes {config.memory_bytes}, of which it holds {held}")
    try:
        require_fit(needs, sizes, budget, who)
    except ConfigError as error:
        raise NotAvailableError(str(error)) from error


def slots_held(config: ClusterConfig, layers: tuple[int, ...], num_experts: int) -> int:
    """Slots per layer without spare ones: for the first placement, and for the fewest peers of the cluster."""
    ranks = tuple(GlobalRank(rank) for rank in range(config.peers))
    replicas = expand_replicas(config.replicas, layers)
    first = balanced(dict.fromkeys(layers, num_experts), ranks, replicas=replicas, spare_slots=0)
    return max(pool_capacity(first), -(-num_experts // config.fewest_peers))


def _sizes(config: ClusterConfig, model: Path) -> tuple[ModelNeeds, Sizes]:
    needs = model_needs(model, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code)
    window, workspace = _kernel_memory(config, needs)
    return needs, Sizes(
        peers=config.peers,
        held=slots_held(config, needs.layers, needs.num_experts),
        spare=0 if config.spare_slots == "auto" else config.spare_slots,
        kv_blocks=config.kv_blocks,
        block_size=config.block_size,
        tokens=config.max_prefill_tokens,
        decode_rows=config.max_decode_rows,
        bucket_rows=tuple(bucket.slot_rows for bucket in config.decode_buckets),
        graph_rows=decode_sizes(config.max_decode_rows) if runs_kernels(config) else (),
        window=window,
        workspace=workspace,
    )


def _kernel_memory(config: ClusterConfig, needs: ModelNeeds) -> tuple[int, int]:
    """Bytes of a peer's window, and of what kernels of the whole layer write into: 0 where there are none."""
    regions = regions_of(config, needs.top_k, needs.hidden)
    window = 0 if regions is None else regions.device_nbytes
    if not runs_kernels(config):
        return window, 0
    tokens = most_tokens(config) if regions is None else regions.token_slots
    shape = (needs.num_experts, needs.top_k, needs.hidden, needs.ffn)
    # Over windows results go home, unless an owner sums them first.
    return window, workspace_nbytes(*shape, tokens, needs.itemsize, results=regions is None or regions.partial)


def _budget(config: ClusterConfig, free: int, sharers: int = 1) -> Budget:
    return Budget.of(config.memory_bytes, config.memory_fraction, free, config.device, sharers)


def _free_on_host() -> int:
    """What the machine has, and what the control groups that this process is in leave of it: page cache is free."""
    return int(min([psutil.virtual_memory().available, *map(_left_in, _own_groups())]))


def _own_groups() -> list[Path]:
    """The folders of this process's control group (version 2) and of those that it lies in."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return []
    paths = [Path(line.removeprefix("0::/").strip()) for line in lines if line.startswith("0::/")]
    # A group outside of what is mounted here is named by "..": what is seen at the top is all there is then.
    return [_CGROUPS / part for path in paths for part in (path, *path.parents) if ".." not in part.parts]


def _left_in(group: Path) -> float:
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # the top has none, nor has a group without a limit ("max")
        return math.inf
    return max(0, limit - used + int(stat.get("inactive_file", 0)))
