"""Faults in a running cluster, and what must hold meanwhile: actors are held, killed, made to lie; streams decode on.

Whatever a fault needs inside an actor runs there by `__ray_call__`, which Ray gives every actor: the product has no
hooks for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle

from ray_moe.actors.fill import CHUNK_BYTES
from ray_moe.actors.reports import Directory
from ray_moe.cluster import Cluster
from ray_moe.controlplane.effects import Peer
from ray_moe.controlplane.operations import Operation, Stage
from ray_moe.deadline import ray_get
from ray_moe.engine.sampling import SamplingParams
from ray_moe.errors import NotServingError
from ray_moe.sdk import Client

_T = TypeVar("_T")
SECONDS = 60.0
NAMESPACE = "ray_moe"


def until(condition: Callable[[], _T], seconds: float = SECONDS, what: str = "") -> _T:
    """Poll a condition of the running system; its value once it is true. Fails when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not true within {seconds} s: {what or condition}"
        time.sleep(0.03)


# -- Actors


def actor_of(cluster: Cluster, role: str | int) -> ActorHandle:
    """ "controller", "routing", or the expert actor of a rank."""
    name = role if isinstance(role, str) else f"expert-{role}"
    return ray.get_actor(f"{cluster.name}.{name}", namespace=NAMESPACE)


def exists(cluster: Cluster, rank: int) -> bool:
    """Whether the rank has an actor, however far that is."""
    names = {found["name"] for found in ray.util.list_named_actors(all_namespaces=True)}
    return f"{cluster.name}.expert-{rank}" in names


def report_of(cluster: Cluster, rank: int) -> Peer:
    """What the rank says of itself."""
    return ray_get(actor_of(cluster, rank).report.remote(), SECONDS, f"report of rank {rank}")


def inside(actor: ActorHandle, work: Callable[..., _T], *args: Any) -> _T:
    """What `work(instance, *args)` returns in the actor's process."""
    return ray_get(actor.__ray_call__.remote(work, *args), SECONDS, f"{work.__name__} inside an actor")


def pid_of(actor: ActorHandle) -> int:
    return inside(actor, _pid)


def kill(*actors: ActorHandle) -> None:
    """kill -9 of the actors' processes, all at once."""
    for pid in [pid_of(actor) for actor in actors]:
        os.kill(pid, signal.SIGKILL)


def requests_in(actor: ActorHandle) -> list[str]:
    """The states of the rank's open requests ("waiting", "prefill", "decode"), oldest first."""
    return inside(actor, _requests)


def hold(actor: ActorHandle, path: str) -> None:
    """Calls of the coroutine function at `path` ("_seats.join") inside the actor wait until `let_go`."""
    inside(actor, _hold, path)


def let_go(actor: ActorHandle, path: str) -> None:
    """End `hold`: those that wait go on."""
    inside(actor, _let_go, path)


def throttle(actor: ActorHandle, bytes_per_second: float | None) -> None:
    """From now on the rank takes in and gives out so many bytes per second, and asks for one expert at a time."""
    inside(actor, _throttle, bytes_per_second)


def corrupt_exports(actor: ActorHandle, *, wrong: bool) -> None:
    """While `wrong`, one bit of every slot that the rank gives to others is another one."""
    inside(actor, _corrupt_exports, wrong)


def corrupt_reads(actor: ActorHandle, *, wrong: bool) -> None:
    """While `wrong`, one value of every expert that the rank reads from its checkpoint is another one."""
    inside(actor, _corrupt_reads, wrong)


def refuse_publications(cluster: Cluster, *, refused: bool) -> None:
    """While `refused`, the routing actor's registry takes no new generation."""
    inside(actor_of(cluster, "routing"), _refuse_publications, refused)


def _pid(_: Any) -> int:
    return os.getpid()


def _requests(instance: Any) -> list[str]:
    return [opened.state.value for opened in tuple(instance._engine.scheduler._open.values())]


def _owner(instance: Any, path: str) -> tuple[Any, str]:
    *owners, name = path.split(".")
    for owner in owners:
        instance = getattr(instance, owner)
    return instance, name


def _hold(instance: Any, path: str) -> None:
    owner, name = _owner(instance, path)
    work, gate = getattr(owner, name), asyncio.Event()

    async def held(*args: Any, **kwargs: Any) -> Any:
        await gate.wait()
        return await work(*args, **kwargs)

    held.gate = gate  # type: ignore[attr-defined]
    setattr(owner, name, held)


def _let_go(instance: Any, path: str) -> None:
    owner, name = _owner(instance, path)
    held = owner.__dict__.pop(name)
    held.gate.set()


def _throttle(instance: Any, bytes_per_second: float | None) -> None:
    filler = instance._filler
    filler._throttle = type(filler._throttle)(bytes_per_second)
    filler._chunk_bytes = CHUNK_BYTES if bytes_per_second is None else 1


def _corrupt_exports(instance: Any, wrong: bool) -> None:
    filler = instance._filler
    filler.__dict__.pop("export_slots", None)
    if not wrong:
        return
    honest = filler.export_slots

    async def corrupted(slots: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
        return tuple(map(_with_a_bit_flipped, await honest(slots)))

    filler.export_slots = corrupted


def _with_a_bit_flipped(given: Any) -> Any:
    if isinstance(given, Exception):
        return given
    name, tensor = next(iter(given.tensors.items()))
    tensor = tensor.copy()
    tensor.reshape(-1)[0] ^= 1
    return replace(given, tensors={**given.tensors, name: tensor})


def _corrupt_reads(instance: Any, wrong: bool) -> None:
    filler = instance._filler
    filler._read = instance._read_expert
    if not wrong:
        return
    honest = filler._read

    def corrupted(key: str, layer: int, expert: int) -> Any:
        weights = honest(key, layer, expert)
        weights.named_tensors()[0][1].view(-1)[0] += 1
        return weights

    filler._read = corrupted


def _refuse_publications(instance: Any, refused: bool) -> None:
    instance._registry.__dict__.pop("publish", None)
    if refused:
        instance._registry.publish = _refuse


def _refuse(*_: object) -> None:
    """Belongs to this module, because the registry is pickled with it."""
    raise NotServingError("the registry takes nothing now")


# -- Operations


def stage_of(cluster: Cluster, number: int) -> Stage:
    return cluster.operation(number).stage


def reached(cluster: Cluster, number: int, stage: Stage) -> Operation:
    """The operation once it is in `stage`; fails when it ends otherwise."""

    def there() -> Operation | None:
        operation = cluster.operation(number)
        assert not operation.ended or operation.stage is stage, f"ended {operation.stage}: {operation.reason}"
        return operation if operation.stage is stage else None

    return until(there, what=f"operation {number} is {stage}")


def ended(cluster: Cluster, number: int, seconds: float = 2 * SECONDS) -> Operation:
    operation = cluster.wait(number, seconds)
    assert operation.ended, f"operation {number} is still {operation.stage}: {operation.reason}"
    return operation


def done(cluster: Cluster, number: int) -> Operation:
    operation = ended(cluster, number)
    assert operation.stage is Stage.DONE, f"operation {number} ended {operation.stage}: {operation.reason}"
    return operation


def reasons_until_ended(cluster: Cluster, number: int) -> tuple[Operation, set[str]]:
    """The operation as it ended, and what it was said to suffer from meanwhile."""
    said: set[str] = set()

    def over() -> Operation | None:
        operation = cluster.operation(number)
        if operation.ended:
            return operation
        said.add(operation.reason)
        return None

    return until(over, what=f"the end of operation {number}"), said


def ranks_of(cluster: Cluster) -> tuple[int, ...]:
    return tuple(rank.value for rank in cluster.placement().group.peers)


def left_over(cluster: Cluster, first_ranks: Sequence[int] = (0, 1)) -> dict[str, object]:
    """What is there and belongs to no serving rank and no active generation; empty when all is as it should be.

    `first_ranks` came with the cluster, and have no placement group of their own.
    """
    active = cluster.placement()
    ranks, found = ranks_of(cluster), {}
    names = {f"{cluster.name}.{role}" for role in ("controller", "routing", *(f"expert-{rank}" for rank in ranks))}
    mine = f"{cluster.name}."
    actors = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    actors = {name for name in actors if name.startswith(mine)}
    rooms = {room["name"] for room in ray.util.placement_group_table().values() if room["state"] != "REMOVED"}
    rooms = {name for name in rooms if name.startswith(mine)}
    if actors != names:
        found["actors"] = actors ^ names
    if rooms != {f"{cluster.name}.expert-{rank}" for rank in ranks if rank not in first_ranks}:
        found["placement groups"] = rooms
    for rank in ranks:
        peer = report_of(cluster, rank)
        used = {
            (layer.layer, slot.pool_slot): slot.parameter_digest
            for layer in active.layers
            for slot in layer.slots
            if slot.destination_rank.value == rank
        }
        if dict(peer.slots) != used:
            found[f"slots of rank {rank}"] = set(peer.slots.items()) ^ set(used.items())
        # The one before goes when the next generation is staged; its groups are closed.
        if max(peer.epochs) != active.group.epoch or len(peer.epochs) > 2:
            found[f"epochs of rank {rank}"] = peer.epochs
        if not peer.admitting:
            found[f"rank {rank}"] = "admits nothing"
    status = cluster.status()
    live = [row for row in status.generations if row.state != "RETIRED"]
    holders = [sorted(row.holders) for row in live]
    if holders != [sorted(f"rank-{rank}" for rank in ranks)] or live[0].generation != active.generation:
        found["generations"] = live
    if status.operations:
        found["operations"] = status.operations
    return found


def settled(cluster: Cluster) -> None:
    """Wait until nothing is left over."""
    last: dict[str, object] = {}

    def clean() -> bool:
        nonlocal last
        last = left_over(cluster)
        return not last

    try:
        until(clean, 30.0)
    except AssertionError:
        raise AssertionError(f"left over: {last}") from None


# -- Load


class Expected:
    """What requests get from a placement at rest: prompts, parameters and tokens by number."""

    def __init__(self, directory: Directory, streams: int, tokens: int) -> None:
        self.prompts = [tuple(range(40 + 3 * number, 60 + 5 * number)) for number in range(streams)]
        self.params = [
            SamplingParams(max_tokens=tokens, temperature=0.7, seed=number, ignore_eos=True)
            for number in range(streams)
        ]
        self.tokens = asyncio.run(self._generate(directory))

    async def _generate(self, directory: Directory) -> list[tuple[int, ...]]:
        client = Client(directory)
        asked = (client.generate(prompt, some) for prompt, some in zip(self.prompts, self.params, strict=True))
        return [result.token_ids for result in await asyncio.gather(*asked)]


class Load:
    """Streams that decode on a thread of their own while a test breaks things; each begins again when it has ended.

    As a context manager it ends them and demands that none failed and that every token is the expected one.
    """

    def __init__(self, cluster: Cluster, expected: Expected) -> None:
        self._directory, self._expected = cluster.directory(), expected
        self.counts = [0] * len(expected.tokens)
        self.generations: set[int] = set()
        self.epochs: set[int] = set()
        self.failures: list[BaseException] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Load:
        self._thread.start()
        self.flows()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopping.set()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "a stream neither ended nor failed"
        if kind is None:
            assert not self.failures, self.failures

    def flows(self, tokens: int = 3) -> None:
        """Every stream gets so many more tokens."""
        before = list(self.counts)

        def more() -> bool:
            assert not self.failures, self.failures
            return all(now >= then + tokens for now, then in zip(self.counts, before, strict=True))

        until(more, what=f"{tokens} more tokens for each of {len(before)} streams")

    async def _run(self) -> None:
        client = Client(self._directory)
        results = await asyncio.gather(
            *(self._one(client, number) for number in range(len(self.counts))), return_exceptions=True
        )
        self.failures += [result for result in results if isinstance(result, BaseException)]

    async def _one(self, client: Client, number: int) -> None:
        prompt, params, expected = (
            wanted[number] for wanted in (self._expected.prompts, self._expected.params, self._expected.tokens)
        )
        while not self._stopping.is_set():
            got = 0
            stream = client.stream(prompt, params)
            try:
                async for record in stream:
                    assert record.index == got, f"stream {number} goes on at {record.index} after {got} tokens"
                    tokens = record.token_ids
                    assert tokens == expected[got : got + len(tokens)], f"stream {number} differs from token {got} on"
                    got += len(tokens)
                    self.counts[number] += len(tokens)
                    self.generations.add(record.generation)
                    self.epochs.add(record.epoch)
                    if self._stopping.is_set():
                        break
                else:
                    assert got == len(expected), f"stream {number} ended after {got} tokens"
            except BaseException as error:
                self.failures.append(error)
                raise
            finally:
                await stream.aclose()
