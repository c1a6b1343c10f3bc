"""Every error the product raises, by name.

A message names the value and the bound, or the rank, epoch and generation, so that one line of a log is enough to act
on. Errors travel between processes by pickle, so each keeps its constructor's arguments in `args`.
"""

from __future__ import annotations

from collections.abc import Sequence


class RayMoEError(Exception):
    """Root of all errors that ray_moe raises on purpose."""


class ConfigError(RayMoEError, ValueError):
    """The caller gave a value outside its bound (CLI: exit 2; HTTP: 4xx)."""


class RequestError(ConfigError):
    """A generation request cannot be admitted: `param` is the offending field in the API's vocabulary."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message, self.param = message, param

    def __str__(self) -> str:
        return self.message


class UnsupportedModelError(ConfigError):
    """A model family that cannot be served exactly is refused before anything is loaded."""

    def __init__(self, family: str, reason: str) -> None:
        super().__init__(family, reason)
        self.family, self.reason = family, reason

    def __str__(self) -> str:
        return f"model family {self.family!r} cannot be served: {self.reason}"


class CheckpointError(RayMoEError):
    """A tensor on disk is missing, truncated, or of another shape or dtype than the model's configuration asks for."""

    def __init__(self, file: str, key: str, expected: str, found: str) -> None:
        super().__init__(file, key, expected, found)
        self.file, self.key, self.expected, self.found = file, key, expected, found

    def __str__(self) -> str:
        return f"checkpoint file {self.file}: tensor {self.key!r}: expected {self.expected}, found {self.found}"


class SlotError(RayMoEError):
    """A slot pool was asked for something its state does not allow (no free slot, overwrite in place, ...)."""


class DigestMismatchError(RayMoEError):
    """Parameters arrived with other bits than the checkpoint has: the slot was left free, and nothing was published."""

    def __init__(self, layer: int, pool_slot: int, expert: int, source: str, expected: str, found: str) -> None:
        super().__init__(layer, pool_slot, expert, source, expected, found)
        self.layer, self.pool_slot, self.expert, self.source = layer, pool_slot, expert, source
        self.expected, self.found = expected, found

    def __str__(self) -> str:
        return (
            f"layer {self.layer} slot {self.pool_slot}: expert {self.expert} from {self.source}: "
            f"expected parameter digest {self.expected}, found {self.found}"
        )


class RoutesError(RayMoEError, ValueError):
    """Routes that no router can have produced: ids out of range, shapes that disagree, a digest that does not match."""


class PlacementError(RayMoEError):
    """A placement, or an assignment under it, that would change the model's function (specification 0x01D1)."""


class CompatibilityError(PlacementError):
    """A physical slot may not serve a route; `clause` is the first of the four clauses that fails."""

    def __init__(self, clause: str, detail: str) -> None:
        super().__init__(clause, detail)
        self.clause, self.detail = clause, detail

    def __str__(self) -> str:
        return f"incompatible slot: clause {self.clause} fails: {self.detail}"


class AssignmentError(PlacementError):
    """An accepted route does not have exactly one assignment inside its replica set; `failure` says which way."""

    failure = "assignment"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.failure}: {self.detail}"


class LostRouteError(AssignmentError):
    failure = "lost_route"


class DuplicateExecutionError(AssignmentError):
    failure = "duplicate_execution"


class NotInReplicaSetError(AssignmentError):
    failure = "not_in_replica_set"


class HandleError(RayMoEError):
    """A dispatch handle was used against its contract (specification 0x02B3, 0x06B)."""


class IllegalTransitionError(HandleError):
    """An event that the handle's lifetime table does not list for its state."""

    def __init__(self, handle_id: str, state: str, event: str, generation: int, epoch: int) -> None:
        super().__init__(handle_id, state, event, generation, epoch)
        self.handle_id, self.state, self.event = handle_id, state, event
        self.generation, self.epoch = generation, epoch

    def __str__(self) -> str:
        return (
            f"handle {self.handle_id}: event {self.event!r} is illegal in state {self.state} "
            f"(generation {self.generation}, epoch {self.epoch})"
        )


class StaleHandleError(HandleError):
    """A handle met another release, generation, group or epoch than its own."""


class LeaseExpiredError(HandleError):
    """A call was not combined while its lease lasted; what it computed is gone, and nobody is held up by it."""

    def __init__(self, handle_id: str, seconds: float) -> None:
        super().__init__(handle_id, seconds)
        self.handle_id, self.seconds = handle_id, seconds

    def __str__(self) -> str:
        return f"handle {self.handle_id} was not combined within the {self.seconds:g} s of its lease"


class CountMismatchError(HandleError):
    """Peers disagree about counts or headers; raised on every peer before any payload moves."""


class EvidenceError(RayMoEError, TypeError):
    """A number was used as evidence of something that it does not show (specification 0x03D)."""


class CompletionError(HandleError):
    """An event or a buffer was used before what it waits for is complete (specification 0x03D4, 0x03D5).

    `reason` is one of released_before_last_reader, missing_dependency, cycle, epoch_before_dependency,
    live_alias_overlap, already_complete, unknown_buffer.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class StageError(HandleError):
    """A dispatcher was called out of its four-stage order, or with the rows of another mode (specification 0x06F)."""


class RunnerError(RayMoEError):
    """A runner cannot execute these segments as they are; `reason` says why, and nothing was dropped."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class TopologyError(PlacementError):
    """Ranks, nodes, relays and groups that contradict one another (specification 0x07); `reason` names the clause."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class ScheduleError(RayMoEError):
    """A schedule that its dependencies, streams, durations or buffers forbid; `reasons` names every kind found."""

    def __init__(self, reasons: Sequence[str], detail: str) -> None:
        super().__init__(tuple(reasons), detail)
        self.reasons, self.detail = tuple(reasons), detail

    def __str__(self) -> str:
        return f"{', '.join(self.reasons)}: {self.detail}"


class BindingError(HandleError):
    """An executable's binding was used outside its generation, its buffers or its step (specification 0x05C)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class GenerationError(RayMoEError):
    """The placement registry refuses an operation on a generation."""


class ReleaseError(GenerationError):
    """The release registry, a bundle or a load refuses; `reason` says what for, `mismatched` which fields disagree."""

    def __init__(self, reason: str, detail: str, mismatched: Sequence[str] = ()) -> None:
        super().__init__(reason, detail, tuple(mismatched))
        self.reason, self.detail, self.mismatched = reason, detail, tuple(mismatched)

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class RetirementRefusedError(GenerationError):
    """A generation is still referenced or held; `holders` says by whom."""

    def __init__(self, generation: int, holders: Sequence[str]) -> None:
        super().__init__(generation, tuple(holders))
        self.generation, self.holders = generation, tuple(holders)

    def __str__(self) -> str:
        return f"generation {self.generation} cannot retire: held by {', '.join(self.holders)}"


class DeadlineError(RayMoEError, TimeoutError):
    """A wait ran past its deadline."""

    def __init__(self, what: str, seconds: float, where: str = "") -> None:
        super().__init__(what, seconds, where)
        self.what, self.seconds, self.where = what, seconds, where

    def __str__(self) -> str:
        return f"{self.what} did not finish within {self.seconds:g} s" + (f" ({self.where})" if self.where else "")


class CollectiveError(RayMoEError):
    """A collective of one epoch failed or timed out on this peer: the epoch is broken and its group must be dropped."""

    def __init__(self, detail: str, rank: int, epoch: int) -> None:
        super().__init__(detail, rank, epoch)
        self.detail, self.rank, self.epoch = detail, rank, epoch

    def __str__(self) -> str:
        return f"{self.detail} (rank {self.rank}, epoch {self.epoch})"


class PeerLostError(RayMoEError):
    """A peer of the expert-parallel group died or stopped answering; calls that needed it fail with this name."""

    def __init__(self, detail: str, rank: int, epoch: int, generation: int) -> None:
        super().__init__(detail, rank, epoch, generation)
        self.detail, self.rank, self.epoch, self.generation = detail, rank, epoch, generation

    def __str__(self) -> str:
        return f"{self.detail} (seen by rank {self.rank}, epoch {self.epoch}, generation {self.generation})"


class AgreementError(RayMoEError):
    """Peers' step records contradict one another (release, generation, epoch or step id)."""


class NotServingError(RayMoEError):
    """The cluster, or the peer that was asked, does not accept requests; the message says why."""


class NotAvailableError(RayMoEError):
    """The machines have no room for what was asked; the message says what it takes and what is free."""


class PeerLeavingError(NotServingError):
    """The peer that was asked is leaving the cluster and admits no request any more; the other peers do."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank

    def __str__(self) -> str:
        return f"rank {self.rank} is leaving and admits no requests"
