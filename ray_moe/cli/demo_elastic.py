"""The demo's second act: a hot topic makes its experts replicate, a rank joins, a rank leaves, a stream goes on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray_moe.errors import NotServingError

if TYPE_CHECKING:
    from ray_moe.cli.output import Output
    from ray_moe.cluster import Cluster
    from ray_moe.controlplane.operations import Operation
    from ray_moe.placement import PlacementSnapshot
    from ray_moe.sdk import Client

# What everybody asks for while the topic is hot, and how long the stream that is watched may be.
HOT_REQUESTS, HOT_TOKENS, WATCHED_TOKENS = 6, 48, 400
_DEMAND_S, _CHANGE_S = 20.0, 80.0
_LOOK_S = 0.25


@dataclass
class Watched:
    """A stream that is started again whenever it has ended: when each token came, and what it ran under."""

    streams: list[list[int]] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    placements: list[tuple[int, int]] = field(default_factory=list)  # (epoch, generation), in order of appearance

    async def run(self, client: Client, prompt_ids: Sequence[int]) -> None:
        """Until cancelled."""
        from ray_moe.engine.sampling import SamplingParams

        params = SamplingParams(max_tokens=WATCHED_TOKENS, temperature=0.0, ignore_eos=True)
        while True:
            self.streams.append([])
            async for record in client.stream(prompt_ids, params):
                self.streams[-1] += record.token_ids
                self.came += [time.perf_counter()] * len(record.token_ids)
                placement = (record.epoch, record.generation)
                if record.token_ids and placement not in self.placements[-1:]:
                    self.placements.append(placement)

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens, ascending."""
        return sorted(later - earlier for earlier, later in zip(self.came, self.came[1:], strict=False))


def second_act(
    cluster: Cluster, out: Output, prompt_ids: Sequence[int], reference: Callable[[int], Sequence[int]]
) -> dict[str, Any]:
    """Change the cluster while a stream runs; what happened, for the demo's document.

    `reference(n)` are the first n greedy tokens of transformers' own model, end-of-sequence tokens passed over. Raises
    `NotServingError` when a change does not come about.
    """
    watched, began = Watched(), time.monotonic()
    changes, hottest = asyncio.run(_act(cluster, out, prompt_ids, watched))
    expected = reference(max(map(len, watched.streams)))
    exact = all(tokens == list(expected[: len(tokens)]) for tokens in watched.streams)
    gaps = watched.gaps
    median, longest = gaps[len(gaps) // 2], gaps[-1]
    out.show(
        f"{len(watched.came)} tokens streamed through {len(watched.placements)} placements, "
        f"{'all equal' if exact else 'NOT equal'} to transformers'; between tokens {median * 1e3:.0f} ms (median), "
        f"{longest * 1e3:.0f} ms (longest)"
    )
    return {
        "token_exact": exact,
        "tokens": len(watched.came),
        "placements": [{"epoch": epoch, "generation": generation} for epoch, generation in watched.placements],
        "median_gap_s": round(median, 4),
        "longest_gap_s": round(longest, 4),
        "hottest": hottest,
        "changes": changes,
        "ranks": list(cluster.directory().ranks),
        "seconds": round(time.monotonic() - began, 2),
    }


async def _act(
    cluster: Cluster, out: Output, prompt_ids: Sequence[int], watched: Watched
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from ray_moe.sdk import Client

    client = Client(await asyncio.to_thread(cluster.directory))
    stream = asyncio.create_task(watched.run(client, prompt_ids))
    try:
        before = await asyncio.to_thread(cluster.placement)
        out.say("a hot topic: everybody asks the same")
        number = await _while_hot(client, prompt_ids, lambda: cluster.rebalance(why="a hot topic"))
        changes = [await _finished(cluster, number, out)]
        hottest = _most_copies(before, await asyncio.to_thread(cluster.placement))
        out.show(
            f"layer {hottest['layer']}: expert {hottest['expert']} has {hottest['copies']} copies, "
            f"it had {hottest['copies_before']}"
        )
        ranks = (await asyncio.to_thread(cluster.directory)).ranks
        out.say(f"scale {len(ranks) + 1}: a rank joins, loading beside the others")
        joined = await asyncio.to_thread(cluster.scale, len(ranks) + 1)
        if joined is None:
            raise NotServingError(f"the cluster has {len(ranks) + 1} ranks already")
        changes.append(await _finished(cluster, joined, out))
        out.say(f"drain {ranks[0]}: rank {ranks[0]} leaves, its experts and requests go elsewhere")
        changes.append(await _finished(cluster, await asyncio.to_thread(cluster.drain, ranks[0]), out))
        await asyncio.sleep(_LOOK_S)  # a few tokens under the last placement
        if stream.done():
            await stream  # it has failed: with its own error
        return changes, hottest
    finally:
        stream.cancel()
        with suppress(asyncio.CancelledError):
            await stream


async def _while_hot(client: Client, prompt_ids: Sequence[int], rebalance: Callable[[], int]) -> int:
    """Ask the same again and again until the peers' reports have told the controller; the rebalance's number."""
    from ray_moe.engine.sampling import SamplingParams
    from ray_moe.errors import ConfigError

    params = SamplingParams(max_tokens=HOT_TOKENS, temperature=0.0, ignore_eos=True)

    async def ask() -> None:
        while True:
            await client.generate(prompt_ids, params)

    asking = [asyncio.create_task(ask()) for _ in range(HOT_REQUESTS)]
    deadline = time.monotonic() + _DEMAND_S
    try:
        while True:
            try:
                return await asyncio.to_thread(rebalance)
            except ConfigError:  # no demand has been reported yet
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_LOOK_S)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _finished(cluster: Cluster, number: int, out: Output) -> dict[str, Any]:
    from ray_moe.controlplane.operations import Stage

    operation: Operation = await asyncio.to_thread(cluster.wait, number, _CHANGE_S)
    if operation.stage is not Stage.DONE:
        raise NotServingError(f"operation {number} is {operation.stage}: {operation.reason}")
    seconds = operation.ended_at - operation.asked_at
    moved = sum(operation.moved_bytes.values())
    out.show(
        f"{operation.kind} done in {seconds:.1f} s: {moved / 1e6:.1f} MB of experts moved and verified, "
        f"the step at the switch took {operation.pause_s * 1e3:.1f} ms longer"
    )
    return {
        "kind": operation.kind.value,
        "ranks": list(operation.ranks),
        "generation": operation.last_generation,
        "moved_bytes": moved,
        "pause_s": round(operation.pause_s, 4),
        "seconds": round(seconds, 2),
    }


def _most_copies(before: PlacementSnapshot, after: PlacementSnapshot) -> dict[str, Any]:
    """The expert that has gained most."""
    gained = [
        (copies - Counter(before.layer[placement.layer].phy2log)[expert], placement.layer, expert, copies)
        for placement in after.layers
        for expert, copies in Counter(placement.phy2log).items()
    ]
    gain, layer, expert, copies = max(gained)
    return {"layer": layer, "expert": expert, "copies": copies, "copies_before": copies - gain}
