"""The parity matrix: which cells there are, what one cell runs, and the record that a whole run leaves.

A cell is a model served one way. It is run under two loads: `alone`, three prompts one after another on peers in turn;
`concurrent`, six prompts at once, dealt unevenly, the last of three or more peers getting none.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import psutil
import ray
import torch
import transformers

from ray_moe.actors.controller import ClusterStatus, ControllerActor
from ray_moe.comm.join import FUSED_WINDOW, TRANSPORTS
from ray_moe.config import ClusterConfig
from ray_moe.dataplane.runners import RUNNERS
from ray_moe.engine.sampling import SamplingParams
from ray_moe.models import tiny_moe_path
from ray_moe.sdk import Client
from ray_moe.text import load_tokenizer
from tests.e2e.oracle import Reference
from tests.e2e.pool import PeerPool
from tests.families import FAMILIES, build_model, family_config, save_model

TINY_MOE = "tiny-moe"
MODELS = (*FAMILIES, TINY_MOE)
LOADS = ("alone", "concurrent")
TOKENS = 64
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
LENGTHS = (5, 40, 300)
STD = 0.22  # of random weights: no continuation runs into a loop, and each depends on the experts
DEALT = {1: (6,), 2: (4, 2), 3: (4, 2, 0), 4: (3, 2, 1, 0)}  # prompts per peer slot under the concurrent load
SCARCE_BLOCKS = 24  # of 16 positions: room for the longest request (23 blocks) and for nothing beside it
SETTLED_S = 20.0  # for the other peers to finish the step that delivered the last token
NEAR_TIES_PER_TOKEN = 1 / 10_000

RECORD = Path(__file__).parents[2] / "benchmarks" / "parity.json"
HELD_OUT = Path(__file__).parents[1] / "unit" / "data" / "tiny_moe_heldout.txt"


@dataclass(frozen=True)
class Cell:
    """One way to serve one model. `replicas`: expert 0 of every layer has two copies, expert 5 up to three."""

    model: str
    peers: int
    replicas: bool
    transport: str = "all_to_all_v"
    runner: str = "grouped"
    kv_blocks: int = 512
    group: str = "tcp"
    strategy: str = "bulk"
    chunks: int = 1
    gate_location: str = "origin"
    decode_buckets: str = ""

    def __str__(self) -> str:
        usual = Cell(self.model, self.peers, self.replicas)
        changes = [
            str(value).replace(",", ".") for name, value in asdict(self).items() if value != getattr(usual, name)
        ]
        return "-".join([self.model, f"{self.peers}p", *(["replicas"] if self.replicas else []), *changes])

    def config(self, folder: Path) -> ClusterConfig:
        return ClusterConfig(
            name=str(self),
            model=str(folder),
            peers=self.peers,
            replicas=f"*:0=2,*:5={min(3, self.peers)}" if self.replicas else "",
            transport=self.transport,
            runner=self.runner,
            transport_chunks=self.chunks,
            node_labels=("a", "b", "a", "b")[: self.peers] if self.transport == "hierarchical" else (),
            strategy=self.strategy,
            strategy_parts=3,
            gate_location=self.gate_location,
            decode_buckets=self.decode_buckets,
            kv_blocks=self.kv_blocks,
            group=self.group,
            audit_rate=1 / 16,
        )


# One rank cannot hold two copies of an expert: there is no cell of one peer with replicas.
USUAL_CELLS = tuple(
    Cell(model, peers, replicas)
    for model in MODELS
    for peers in (1, 2, 3, 4)
    for replicas in (False, True)
    if not (replicas and peers == 1)
)
# Each alone differs from the usual way: what carries rows, what computes them, in which order, and the fixed shapes.
WITH_SHARED_EXPERTS = ("qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe")
OTHER_CELLS = tuple(
    cell
    for model in MODELS
    for cell in (
        *(Cell(model, 4, True, name) for name in TRANSPORTS if name not in ("all_to_all_v", FUSED_WINDOW)),
        Cell(model, 4, True, "hierarchical", chunks=2),
        *(Cell(model, 4, True, runner=runner) for runner in RUNNERS if runner != "grouped"),
        *(Cell(model, 4, True, strategy=name) for name in ("chunk_pipeline", "microbatch_pipeline")),
        *(Cell(model, 4, True, strategy="shared_path") for _ in range(model in WITH_SHARED_EXPERTS)),
        Cell(model, 4, True, gate_location="expert"),
        Cell(model, 4, True, decode_buckets="1x3,2x5"),  # three requests on one peer do not fit
        Cell(model, 2, False, kv_blocks=SCARCE_BLOCKS),
        Cell(model, 4, True, group="gloo"),
    )
)
FULL_CELLS = USUAL_CELLS + OTHER_CELLS


@dataclass(frozen=True)
class Row:
    """What one cell gave under one load. Rows of `rows_sent` crossed to another peer, by rank, over all MoE layers."""

    model: str
    peers: int
    replicas: bool
    load: str
    transport: str
    runner: str
    kv_blocks: int
    group: str
    strategy: str
    chunks: int
    gate_location: str
    decode_buckets: str
    requests: int
    tokens: int
    token_exact: bool
    near_ties: int
    slots_per_layer: int
    most_slots_of_a_rank: int
    rows_local: tuple[int, ...]
    rows_sent: tuple[int, ...]
    preemptions: int
    replays: int
    fallbacks: int
    seconds: float

    @property
    def key(self) -> tuple[object, ...]:
        return (*(getattr(self, item.name) for item in fields(Cell)), self.load)


def keys(cells: Iterable[Cell]) -> list[tuple[object, ...]]:
    return [(*asdict(cell).values(), load) for cell in cells for load in LOADS]


class Lab:
    """What the cells of a session share: peer processes, models, references, and the rows so far."""

    def __init__(self, pool: PeerPool, directory: Path) -> None:
        self.pool, self.rows = pool, list[Row]()
        self._directory = directory
        self._references: dict[str, Reference] = {}

    def reference(self, model: str) -> Reference:
        if model not in self._references:
            self._references[model] = Reference(self._folder(model))
        return self._references[model]

    def _folder(self, model: str) -> Path:
        if model == TINY_MOE:
            return tiny_moe_path()
        return save_model(build_model(family_config(model), std=STD), self._directory / model)

    def run(self, cell: Cell, loads: Sequence[str] = LOADS) -> list[Row]:
        """Serve the cell's model, run the loads, check everything, and keep the rows."""
        rows = asyncio.run(self._run(cell, loads))
        self.rows += rows
        return rows

    async def _run(self, cell: Cell, loads: Sequence[str]) -> list[Row]:
        reference = self.reference(cell.model)
        async with self.pool.serving(cell.config(reference.folder)) as controller:
            client = Client(await controller.directory())
            facts = client.directory.facts
            assert facts.trunk_parameters == reference.trunk_parameters, "a trunk holds more than a trunk"
            return [await self._run_load(cell, load, controller, client, reference) for load in loads]

    async def _run_load(
        self, cell: Cell, load: str, controller: ControllerActor, client: Client, reference: Reference
    ) -> Row:
        asked = requests_of(cell, load)
        before, preempted = await settled(controller.status), await self._preemptions(cell)
        started = time.monotonic()
        if load == "alone":
            found = [await client.generate(prompt, GREEDY, peer=peer) for prompt, peer in asked]
        else:
            found = await asyncio.gather(*(client.generate(prompt, GREEDY, peer=peer) for prompt, peer in asked))
        seconds = time.monotonic() - started
        after, preempted = await settled(controller.status), await self._preemptions(cell) - preempted

        near = 0
        for (prompt, _), generation in zip(asked, found, strict=True):
            assert len(generation.token_ids) == TOKENS
            near += reference.near_ties(prompt, generation.token_ids)
        peers = list(zip(after.peers, before.peers, strict=True))
        rows_local = tuple(new.rows_local - old.rows_local for new, old in peers)
        rows_sent = tuple(new.rows_sent - old.rows_sent for new, old in peers)
        busy = sorted({peer for _, peer in asked})
        assert [peer for peer, sent in enumerate(rows_sent) if sent] == (busy if cell.peers > 1 else [])
        if not preempted:  # every position but a generation's last goes through every layer once, by top-k routes
            positions = sum(len(prompt) + TOKENS - 1 for prompt, _ in asked)
            assert sum(rows_local + rows_sent) == positions * reference.routes_per_position
        return Row(
            **asdict(cell),
            load=load,
            requests=len(asked),
            tokens=len(asked) * TOKENS,
            token_exact=near == 0,
            near_ties=near,
            slots_per_layer=max(Counter(slot.layer for slot in after.slots).values()),
            most_slots_of_a_rank=max(Counter((slot.layer, slot.rank) for slot in after.slots).values()),
            rows_local=rows_local,
            rows_sent=rows_sent,
            preemptions=preempted,
            replays=sum(new.replays - old.replays for new, old in peers),
            fallbacks=sum(sum(new.fallbacks.values()) - sum(old.fallbacks.values()) for new, old in peers),
            seconds=round(seconds, 2),
        )

    async def _preemptions(self, cell: Cell) -> int:
        return sum(await asyncio.gather(*(peer.preemptions.remote() for peer in self.pool.peers[: cell.peers])))


def requests_of(cell: Cell, load: str) -> list[tuple[tuple[int, ...], int]]:
    """Prompts and the peer slots that they are given to."""
    prompts = prompts_of(cell.model)
    if load == "alone":
        return [(prompt, turn % cell.peers) for turn, prompt in enumerate(prompts[: len(LENGTHS)])]
    dealt = [peer for peer, share in enumerate(DEALT[cell.peers]) for _ in range(share)]
    return list(zip(prompts, dealt, strict=True))


@cache
def prompts_of(model: str) -> tuple[tuple[int, ...], ...]:
    """Six prompts of 5, 40 and 300 tokens: random bytes for a random model, text for the trained one."""
    lengths = LENGTHS * 2
    if model == TINY_MOE:
        text = load_tokenizer(tiny_moe_path()).encode(HELD_OUT.read_text(), add_special_tokens=False)
        return tuple(tuple(text[75 * turn :][:length]) for turn, length in enumerate(lengths))
    generator = torch.Generator().manual_seed(7)
    return tuple(tuple(torch.randint(0, 256, (length,), generator=generator).tolist()) for length in lengths)


async def settled(look: Callable[[], Awaitable[ClusterStatus]]) -> ClusterStatus:
    """The status once every peer has finished the last step, checked.

    Nothing of a finished request is left, rows that were sent have arrived, experts are spread as evenly as slots
    allow, and trunks hold none.
    """
    deadline = time.monotonic() + SETTLED_S
    status = await look()
    while not is_quiet(status) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        status = await look()
    assert is_quiet(status), status.peers

    slots = Counter(slot.layer for slot in status.slots)
    held = Counter((slot.rank, slot.layer) for slot in status.slots)
    for peer in status.peers:
        assert peer.state in ("serving", "sleeping"), peer.failure
        assert not peer.trunk_has_experts
        assert peer.resident_slots == {layer: held[peer.rank, layer] for layer in slots}
        assert all(held[peer.rank, layer] <= -(-count // len(status.peers)) for layer, count in slots.items())
    return status


def is_quiet(status: ClusterStatus) -> bool:
    """All KV blocks free, no request open, and each row that one peer counts as sent counted by another as received."""
    left = sum(peer.kv_blocks_used + peer.running + peer.waiting + peer.outstanding_tokens for peer in status.peers)
    return not left and sum(peer.rows_sent - peer.rows_received for peer in status.peers) == 0


def write_record(rows: Sequence[Row]) -> None:
    """One line per row, behind what the run was on."""
    cores, memory = os.cpu_count(), psutil.virtual_memory().total / 2**30
    head = {
        "what": f"greedy tokens equal to transformers' own model (eager experts, fp32), {TOKENS} per prompt",
        "command": "make test-full ARGS=tests/e2e",
        "date": datetime.date.today().isoformat(),
        "hardware": f"{_processor()}, {cores} cores, {memory:.0f} GiB; one thread per process",
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in (torch, ray, transformers)},
        },
        "notes": [
            "one peer has no cell with replicas: every copy of an expert needs a rank of its own",
            "seconds are wall time beside whatever else the machine ran, no benchmark",
        ],
        "tokens": sum(row.tokens for row in rows),
        "near_ties": sum(row.near_ties for row in rows),
    }
    lines = ",\n".join("    " + json.dumps(asdict(row)) for row in rows)
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(head, indent=2)[:-2] + f',\n  "rows": [\n{lines}\n  ]\n}}\n')


def read_record() -> tuple[dict[str, object], list[Row]]:
    """The committed record's head and rows."""
    head = json.loads(RECORD.read_text())
    tuples = ("rows_local", "rows_sent")
    rows = [
        Row(**{name: tuple(value) if name in tuples else value for name, value in row.items()})
        for row in head.pop("rows")
    ]
    return head, rows


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
