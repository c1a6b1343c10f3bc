"""A peer's memory in sums: against arithmetic by hand, against what a real engine takes, and the refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig

from ray_moe.actors import memory
from ray_moe.actors.memory import Room
from ray_moe.config import ClusterConfig
from ray_moe.engine.needs import model_needs
from ray_moe.engine.request import Request
from ray_moe.engine.sampling import SamplingParams
from ray_moe.errors import ConfigError, NotAvailableError
from ray_moe.kernels.regions import Regions, workspace_nbytes
from ray_moe.weights.budget import (
    GIB,
    LAUNCH_BYTES,
    LAUNCHES_PER_LAYER,
    Budget,
    ModelNeeds,
    Sizes,
    add_up,
    require_fit,
    spare_that_fits,
)
from tests.families import FAMILIES
from tests.layers import untimed
from tests.one_peer import OnePeer

NEEDS = ModelNeeds(
    trunk=4 * GIB,
    slot=GIB // 2,
    layers=(0, 1),
    num_experts=16,
    kv_position=2**16,
    hidden=8,
    ffn=4,
    top_k=2,
    vocab=1000,
    itemsize=2,
    attention=20,
    positions=100,
)
SIZES = Sizes(peers=2, held=8, spare=4, kv_blocks=1024, block_size=16, tokens=10, decode_rows=5)


def test_the_terms_are_those_that_a_hand_adds_up() -> None:
    sums = add_up(NEEDS, SIZES)
    block = 16 * 2**16  # one more than requests have, for padding rows
    assert (sums.trunk, sums.slots, sums.kv) == (4 * GIB, 6 * GIB, GIB + block)
    # 2 peers x 10 tokens x 2 routes arrive, each as 2 D and 3 F; 20 routes leave and return; 5 logits.
    # A token is 4 D in the trunk, and twice its query, key, value and result.
    assert sums.work == 2 * (40 * (2 * 8 + 3 * 4) + 20 * 2 * 8 + 10 * (4 * 8 + 2 * 20)) + 2 * 4 * 5 * 1000
    assert (sums.graphs, sums.window, sums.workspace) == (0, 0, 0)
    assert sums.total == 11 * GIB + block + sums.work
    buckets = add_up(NEEDS, replace(SIZES, bucket_rows=(3,)))
    assert buckets.work - sums.work == 2 * 3 * 12 * (2 * 8 + 3 * 4), "3 rows of each of 12 slots"


def test_graphs_hold_inputs_logits_one_step_and_their_launches() -> None:
    sizes = replace(SIZES, graph_rows=(1, 2, 5))
    sums = add_up(NEEDS, sizes)
    # 5 rows: 4 columns, 7 blocks of 16 for 100 positions, an index and a mask, 2 layers x 2 routes, all int64.
    inputs = 8 * 5 * (4 + 7 + 2 + 4)
    logits = 2 * 5 * 1000 * 2
    step = 5 * (4 * 8 + 2 * 20 + 8) * 2 + 5 * 16 * 8
    assert sums.graphs == inputs + logits + step + 3 * 2 * LAUNCHES_PER_LAYER * LAUNCH_BYTES
    assert sums.total == add_up(NEEDS, SIZES).total + sums.graphs


def test_what_a_gpu_holds_beside_is_in_the_sum_and_in_the_refusal() -> None:
    sizes = replace(SIZES, spare=0, graph_rows=(1, 5), window=3 * GIB, workspace=2 * GIB)
    sums = add_up(NEEDS, sizes)
    assert sums.total - add_up(NEEDS, replace(SIZES, spare=0)).total == 5 * GIB + sums.graphs
    with pytest.raises(ConfigError) as refused:
        require_fit(replace(NEEDS, trunk=9 * GIB), sizes, Budget(10 * GIB, "memory_bytes"), "rank 1")
    message = str(refused.value)
    assert "\n" not in message
    assert " + 2 decode graphs of up to 5 rows " in message
    assert " + its window for 2 peers 3 GiB + kernel workspace 2 GiB; " in message
    assert message.endswith("or a smaller max_prefill_tokens and max_decode_rows")
    assert spare_that_fits(NEEDS, sizes, Budget(sums.total + NEEDS.slot, "memory_bytes")) == 1


def test_kernels_graphs_and_windows_are_counted_where_a_configuration_has_them(
    family_dir: Callable[..., Path],
) -> None:
    folder = family_dir("qwen3_moe")
    gpu = {"model": str(folder), "device": "cuda", "dtype": "bfloat16", "max_decode_rows": 8, "kv_blocks": 8}
    needs = model_needs(folder, dtype=torch.bfloat16)
    experts = (needs.num_experts, needs.top_k, needs.hidden, needs.ffn)

    def sizes_of(**more: object) -> Sizes:
        return memory._sizes(ClusterConfig(**gpu, **more), folder)[1]

    alone = sizes_of(peers=1, max_prefill_tokens=100)
    assert (alone.graph_rows, alone.window) == ((1, 2, 4, 8), 0)
    assert alone.workspace == workspace_nbytes(*experts, 100, 2)
    two = sizes_of(peers=2, max_peers=3, group="nccl", transport="fused_window", max_prefill_tokens=100)
    regions = Regions.plan(3, 100, needs.top_k, needs.hidden, torch.bfloat16)
    assert two.window == regions.device_nbytes >= regions.nbytes
    assert two.workspace == workspace_nbytes(*experts, 300, 2, results=False)
    by_handles = sizes_of(peers=1, runner="block_sparse")
    assert (by_handles.graph_rows, by_handles.window, by_handles.workspace) == ((), 0, 0)
    assert sizes_of(peers=1, adaptive="all").graph_rows == ()


def test_a_refusal_names_every_term_the_sum_the_budget_and_each_single_way_out() -> None:
    need = add_up(NEEDS, SIZES).total
    held = 11 * GIB + 16 * 2**16  # all but the work
    assert require_fit(NEEDS, SIZES, Budget(need, "memory_bytes"), "rank 0").total == need
    wide = replace(NEEDS, vocab=2**30 // 40 - (need - held) // 40 + NEEDS.vocab)
    with pytest.raises(ConfigError) as refused:
        require_fit(wide, SIZES, Budget(held, f"memory_bytes {held}"), "rank 3")
    assert str(refused.value) == (
        f"rank 3 needs 12 GiB of memory, 1 GiB more than its 11 GiB (memory_bytes {held}): trunk 4 GiB + expert "
        "slots 6 GiB (12 per layer, 4 of them spare) + KV cache 1 GiB (1024 blocks of 16) + work buffers 1 GiB; "
        "lower spare_slots to 2"
    )
    with pytest.raises(ConfigError, match=r"more peers .* a dtype of 2 bytes, fewer spare_slots and kv_blocks"):
        require_fit(replace(NEEDS, itemsize=4), SIZES, Budget(5 * GIB, "memory_bytes"), "rank 0")


@given(
    spare=st.integers(0, 9),
    blocks=st.integers(1, 3000),
    slot=st.integers(1, GIB),
    budget=st.integers(4 * GIB, 16 * GIB),
)
@untimed
def test_what_a_refusal_advises_fits(spare: int, blocks: int, slot: int, budget: int) -> None:
    needs, sizes = replace(NEEDS, slot=slot), replace(SIZES, spare=spare, kv_blocks=blocks)
    limit = Budget(budget, "memory_bytes")
    try:
        require_fit(needs, sizes, limit, "rank 0")
    except ConfigError as error:
        words = str(error).rpartition("; ")[2].split()
        for field in ("spare_slots", "kv_blocks"):
            if words[0] == "lower" and field in words:
                value = int(words[words.index(field) + 2])
                changed = {"spare_slots": "spare", "kv_blocks": "kv_blocks"}[field]
                assert 0 <= value < getattr(sizes, changed)
                require_fit(needs, replace(sizes, **{changed: value}), limit, "rank 0")
    else:
        assert add_up(needs, sizes).total <= budget


@given(slot=st.integers(1, GIB), budget=st.integers(0, 32 * GIB), rows=st.lists(st.integers(1, 64), max_size=2))
@untimed
def test_automatic_spare_slots_are_the_most_that_fit_and_no_more_than_are_held(
    slot: int, budget: int, rows: list[int]
) -> None:
    needs, sizes = replace(NEEDS, slot=slot), replace(SIZES, bucket_rows=tuple(rows))
    spare = spare_that_fits(needs, sizes, Budget(budget, "memory_bytes"))
    fits = [n for n in range(sizes.held + 1) if add_up(needs, replace(sizes, spare=n)).total <= budget]
    assert spare == max(fits, default=0)


def test_a_budget_is_a_fraction_of_a_peers_share_or_what_is_given_but_never_more_than_is_free() -> None:
    assert Budget.of(None, 0.9, 100, "cuda") == Budget(90, "memory_fraction 0.9 of 9.54e-05 MiB free on cuda")
    shared = Budget.of(None, 0.5, 8 * GIB, "cpu", 4)
    assert shared == Budget(GIB, "memory_fraction 0.5 of 8 GiB free on cpu for 4 peers")
    assert Budget.of(2 * GIB, 0.1, 8 * GIB, "cpu", 4) == Budget(2 * GIB, f"memory_bytes {2 * GIB}")
    more = Budget.of(3 * GIB, 0.9, 8 * GIB, "cpu", 4)
    assert more == Budget(2 * GIB, f"8 GiB free on cpu for 4 peers, less than memory_bytes {3 * GIB}")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_models_needs_are_what_its_engine_takes(family: str, family_dir: Callable[..., Path]) -> None:
    folder = family_dir(family)
    needs = model_needs(folder, dtype=torch.float32)
    with OnePeer(folder) as peer:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        peer.loop.submit(Request("one", (1, 2, 3), params))
        peer.outlet.until_ended("one")
        assert peer.outlet.refusals == {}
        tensors = [*peer.trunk.model.parameters(), *peer.trunk.model.buffers()]
        assert needs.trunk == sum(tensor.nbytes for tensor in tensors)
        assert needs.slot == sum(peer.pool.slot_bytes(layer) for layer in peer.pool.layers)
        assert needs.layers == peer.pool.layers
        assert needs.kv_position == peer.loop.cache.position_bytes
        assert (needs.top_k, needs.vocab) == (peer.trunk.top_k, peer.trunk.vocab_size)


def test_a_full_size_models_needs_follow_from_its_configuration_alone(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, as its card says."""
    Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        vocab_size=151936,
    ).save_pretrained(tmp_path)
    needs = model_needs(tmp_path, dtype=torch.bfloat16)
    assert needs.slot == 48 * 3 * 2048 * 768 * 2
    assert round((needs.trunk + 128 * needs.slot) / 2 / 1e9, 1) == 30.5
    assert needs.kv_position == 48 * 4 * 2 * 128 * 2
    assert needs.attention == 128 * (32 + 4 + 4 + 32)


def test_peers_of_one_machine_share_it_and_the_first_that_is_too_small_is_named(
    family_dir: Callable[..., Path],
) -> None:
    folder = family_dir("qwen3_moe")
    needs = model_needs(folder, dtype=torch.float32)
    config = ClusterConfig(model=str(folder), peers=2, kv_blocks=8, memory_fraction=1.0, max_prefill_tokens=16)
    sizes = Sizes(2, held=4, spare=0, kv_blocks=8, block_size=16, tokens=16, decode_rows=64)
    alone = add_up(needs, sizes).total
    assert memory.spare_slots(config, folder, {0: Room("a", 2 * alone), 1: Room("a", 2 * alone)}) == 0
    assert memory.spare_slots(config, folder, {0: Room("a", alone), 1: Room("b", alone)}) == 0
    with pytest.raises(ConfigError, match=r"^rank 0 needs .* free on cpu for 2 peers"):
        memory.spare_slots(config, folder, {0: Room("a", 2 * alone - 2), 1: Room("a", 2 * alone - 2)})
    with pytest.raises(ConfigError, match=r"^rank 1 needs"):
        memory.spare_slots(config, folder, {0: Room("a", alone), 1: Room("b", alone - 1)})
    auto = config.model_copy(update={"spare_slots": "auto"})
    wide = alone + 2 * needs.slot + needs.slot // 2
    assert memory.spare_slots(auto, folder, {0: Room("a", wide), 1: Room("b", 100 * alone)}) == 2, "the narrower rank"
    assert memory.spare_slots(auto, folder, {0: Room("a", 100 * alone), 1: Room("b", 100 * alone)}) == 4


def test_what_is_free_on_this_machine_is_some_and_not_more_than_it_has() -> None:
    room = memory.room_on("node-0", "cpu")
    assert room.node == "node-0"
    assert 0 < room.free <= psutil.virtual_memory().total


def test_one_peer_more_is_not_available_where_it_does_not_fit(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    needs = model_needs(folder, dtype=torch.float32)
    config = ClusterConfig(model=str(folder), peers=2, memory_bytes=needs.trunk + 2 * needs.slot)
    small = config.model_copy(update={"max_decode_rows": 1, "max_prefill_tokens": 1})
    memory.require_room(small, folder, None, who="rank 2")
    with pytest.raises(NotAvailableError, match=r"^rank 2 needs .* expert slots .* \(4 per layer\)"):
        memory.require_room(config, folder, 4, who="rank 2")


def test_peers_that_come_together_must_all_fit(
    family_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family_dir("qwen3_moe")
    config = ClusterConfig(model=str(folder), peers=2, kv_blocks=8, memory_fraction=1.0, max_prefill_tokens=16)
    sizes = Sizes(2, held=4, spare=0, kv_blocks=8, block_size=16, tokens=16, decode_rows=64)
    alone = add_up(model_needs(folder, dtype=torch.float32), sizes).total
    monkeypatch.setattr(memory, "_free_on_host", lambda: 2 * alone)
    memory.require_room(config, folder, 4, who="rank 2", sharers=2)
    monkeypatch.setattr(memory, "_free_on_host", lambda: 2 * alone - 2)
    memory.require_room(config, folder, 4, who="rank 2")
    with pytest.raises(NotAvailableError, match=r"^rank 2 needs .* free on cpu for 2 peers"):
        memory.require_room(config, folder, 4, who="rank 2", sharers=2)


def test_another_checkpoint_must_fit_beside_what_a_peer_holds(family_dir: Callable[..., Path]) -> None:
    folder = family_dir("qwen3_moe")
    config = ClusterConfig(model=str(folder), peers=2, max_prefill_tokens=16)
    sizes = Sizes(2, held=0, spare=0, kv_blocks=0, block_size=16, tokens=16, decode_rows=64)
    alone = add_up(model_needs(folder, dtype=torch.float32), sizes).total
    limited = config.model_copy(update={"memory_bytes": alone + 100})
    memory.require_room(limited, folder, None, who="another", held=100)
    with pytest.raises(
        NotAvailableError, match=rf"^another needs .* \(memory_bytes {alone + 100}, of which it holds 101"
    ):
        memory.require_room(limited, folder, None, who="another", held=101)


def test_what_is_free_is_the_least_that_any_control_group_around_this_process_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    monkeypatch.setattr(memory, "_CGROUPS", groups)
    monkeypatch.setattr(memory, "_OWN_CGROUP", own)
    machine = memory.room_on("", "cpu").free
    assert machine > 2**20, "without groups it is the machine's"

    def group(path: str, limit: str, used: int, cache: int) -> None:
        (groups / path).mkdir(parents=True, exist_ok=True)
        for name, text in {"max": limit, "current": str(used), "stat": f"anon 1\ninactive_file {cache}\n"}.items():
            (groups / path / f"memory.{name}").write_text(text)

    group("", "max", 0, 0)
    group("slice", "9000", 5000, 300)
    group("slice/app", "max", 4000, 0)
    for line, expected in (("0::/slice/app", 4300), ("0::/slice", 4300), ("4:memory:/slice\n0::/slice/gone", 4300)):
        own.write_text(f"{line}\n")
        assert memory.room_on("", "cpu").free == expected
    group("slice/app", "5000", 4000, 0)
    own.write_text("0::/slice/app\n")
    assert memory.room_on("", "cpu").free == 1000
    own.write_text("0::/../../slice\n")  # of a group that is not mounted here, only the top is seen
    assert memory.room_on("", "cpu").free > 2**20
    group("", "100", 200, 0)
    assert memory.room_on("", "cpu").free == 0
