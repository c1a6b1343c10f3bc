"""Promotion: a conjunction of named checks over one release's evidence, and no score (specification 0x0DC, 0x0E).

    evaluate(policy, evidence) -> PromotionReport      every input, every check, and what failed by name

No check makes up for another. A check without evidence has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from ray_moe.controlplane.ratios import BENCHMARK_AXES, MEASURED, Cell, Quantile, Ratio, total
from ray_moe.errors import ConfigError, EvidenceError
from ray_moe.evidence import Elapsed, MeasuredBytes, Measurement

# Counters of a release that must stay at zero.
ZERO_COUNTERS = ("route_output_mismatches", "stale_handle_acceptances", "count_conservation_failures")

# Injected fault -> the one outcome that is safe (0x0E).
FAULTS: Mapping[str, str] = {
    "F01": "reject_build",  # an upstream report's hash drifts
    "F02": "reject_load",  # process-group generation differs
    "F03": "abort_before_payload_exchange",  # peers' route counts disagree
    "F04": "reject_output_before_publish",  # the inverse permutation is corrupt
    "F05": "reject_handle_and_replan",  # a stale handle reaches the new active generation
    "F06": "explicit_eager_fallback",  # a graph key differs
    "F07": "reject_payload_before_expert_compute",  # FP8 scales do not number the rows
    "F08": "block_canary",  # runners disagree
    "F09": "reject_schedule",  # a completion dependency is absent
    "F10": "roll_back_to_prior_generation",  # the active candidate faults
}


def unsafe_faults(outcomes: Mapping[str, str]) -> tuple[str, ...]:
    """The faults that were not injected, or ended otherwise than `FAULTS` says. `ConfigError` for an unknown fault."""
    unknown = outcomes.keys() - FAULTS.keys()
    if unknown:
        raise ConfigError(f"faults are {', '.join(FAULTS)}, found {', '.join(sorted(unknown))}")
    return tuple(fault for fault, safe in FAULTS.items() if outcomes.get(fault) != safe)


# -- Measured gates


@dataclass(frozen=True)
class MeasuredNumber:
    """A number that was measured, in a unit that is neither seconds nor bytes: tokens/s, a difference, a share."""

    value: float
    unit: str
    measurement: Measurement

    def __post_init__(self) -> None:
        if not isinstance(self.measurement, Measurement):
            raise EvidenceError(f"a number in {self.unit} needs the measurement that gave it")


Reading = Elapsed | Quantile | MeasuredBytes | MeasuredNumber


def _seconds(reading: Reading) -> float | None:
    value = reading.value if isinstance(reading, Quantile) else reading
    return value.seconds if isinstance(value, Elapsed) else None


def _bytes(reading: Reading) -> float | None:
    return reading.value if isinstance(reading, MeasuredBytes) else None


def _number(reading: Reading) -> float | None:
    return reading.value if isinstance(reading, MeasuredNumber) else None


# Kind -> (how its number is read, whether the limit is the most or the least, unit of the limit).
_GATE_KINDS: Mapping[str, tuple[Callable[[Reading], float | None], bool, str]] = {
    "latency": (_seconds, True, "s"),
    "throughput": (_number, False, "per s"),
    "memory": (_bytes, True, "bytes"),
    "parity": (_number, True, "difference"),
    "quality": (_number, False, "score"),
    "slo": (_number, False, "share"),
}


@dataclass(frozen=True)
class Gate:
    """A check of its own beside the printed ones: `name`'s reading is at most, or at least, `limit` as its kind says.

    Raises `ConfigError` for an unknown kind.
    """

    name: str
    kind: str
    limit: float

    def __post_init__(self) -> None:
        if self.kind not in _GATE_KINDS:
            raise ConfigError(f"gate {self.name}: kind must be one of {', '.join(_GATE_KINDS)}, found {self.kind!r}")

    def check(self, reading: Reading | None) -> Check:
        """Raises `EvidenceError` for a reading that shows something else: schedule units are no latency."""
        read, at_most, unit = _GATE_KINDS[self.kind]
        bound = f"{'<=' if at_most else '>='} {self.limit:g} {unit}"
        if reading is None:
            return Check(self.name, False, "not measured", bound)
        value = read(reading)
        if value is None:
            kind = type(reading.value if isinstance(reading, Quantile) else reading).__name__
            raise EvidenceError(f"gate {self.name} is about {self.kind}: {kind} shows none")
        return Check(self.name, value <= self.limit if at_most else value >= self.limit, f"{value:g} {unit}", bound)


# -- The conjunction


@dataclass(frozen=True)
class PromotionPolicy:
    """What a release must show. Ratio limits are exact fractions.

    `must_cover` are (axis, value) pairs of the benchmark matrix of which each needs a cell. Synthetic cells count only
    with `accept_synthetic`; without `has_graphs` there is nothing to fall back from. Raises `ConfigError` for a limit
    that is no fraction in [0, 1], a sample minimum below 1, an unknown axis and two gates of one name.
    """

    shadow_samples_min: int = 100
    canary_samples_min: int = 200
    drop_ratio_max: Fraction = Fraction(5, 1000)
    fallback_ratio_max: Fraction = Fraction(15, 100)
    gates: tuple[Gate, ...] = ()
    must_cover: tuple[tuple[str, str], ...] = ()
    accept_synthetic: bool = False
    has_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("drop_ratio_max", "fallback_ratio_max"):
            limit = getattr(self, name)
            if not isinstance(limit, Fraction) or not 0 <= limit <= 1:
                raise ConfigError(f"{name} must be a fraction in [0, 1], found {limit!r}")
        for name in ("shadow_samples_min", "canary_samples_min"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, found {getattr(self, name)}")
        for axis, _ in self.must_cover:
            if axis not in BENCHMARK_AXES:
                raise ConfigError(f"must_cover: axis must be one of {', '.join(BENCHMARK_AXES)}, found {axis!r}")
        names = [gate.name for gate in self.gates]
        if len(set(names)) < len(names):
            raise ConfigError(f"every gate has its own name, found {', '.join(names)}")


@dataclass(frozen=True)
class PromotionEvidence:
    """All that a promotion rests on. The lists name what is wrong; an empty one says that somebody has looked.

    `drifted` digests, `mismatched` manifest fields of any peer, `unsafe_faults` of a fault drill (`unsafe_faults`),
    `rollback_rehearsed` whether the ordered rollback has been carried out with this release. Raises `EvidenceError`
    when a cell is of another release.
    """

    release_id: str
    drifted: tuple[str, ...]
    mismatched: tuple[str, ...]
    unsafe_faults: tuple[str, ...]
    rollback_rehearsed: bool
    shadow_samples: int
    canary_samples: int
    cells: tuple[Cell, ...]
    route_output_mismatches: int
    stale_handle_acceptances: int
    count_conservation_failures: int
    readings: tuple[tuple[str, Reading], ...] = ()

    def __post_init__(self) -> None:
        for cell in self.cells:
            if cell.release_id != self.release_id:
                raise EvidenceError(f"cell {cell.cell} is of release {cell.release_id}, the evidence {self.release_id}")


@dataclass(frozen=True)
class Check:
    """One clause of the conjunction, for people too."""

    name: str
    passed: bool
    found: str
    bound: str


@dataclass(frozen=True)
class PromotionReport:
    """What was asked, what was shown, and what follows."""

    policy: PromotionPolicy
    evidence: PromotionEvidence
    checks: tuple[Check, ...]

    @property
    def release_id(self) -> str:
        return self.evidence.release_id

    @property
    def failed_checks(self) -> tuple[str, ...]:
        return tuple(check.name for check in self.checks if not check.passed)

    @property
    def promote(self) -> bool:
        return not self.failed_checks


def evaluate(policy: PromotionPolicy, evidence: PromotionEvidence) -> PromotionReport:
    """Every check of `policy` on `evidence`, in the order of specification 0x0DC, the policy's own gates last.

    Raises `EvidenceError` for evidence that cannot be put together, and for a reading that shows something else than
    its gate asks.
    """
    whole = total(evidence.cells) if evidence.cells else None
    drop, fallback = (whole.ratio(name) if whole else None for name in ("drop", "fallback"))
    checks = [
        _nothing("hash_ok", evidence.drifted),
        _nothing("manifest_ok", evidence.mismatched),
        _nothing("faults_ok", evidence.unsafe_faults),
        Check("rollback_ok", evidence.rollback_rehearsed, str(evidence.rollback_rehearsed).lower(), "true"),
        _at_least("shadow_samples", evidence.shadow_samples, policy.shadow_samples_min),
        _at_least("canary_samples", evidence.canary_samples, policy.canary_samples_min),
        _at_most("drop_ratio", drop, policy.drop_ratio_max),
        *([_at_most("fallback_ratio", fallback, policy.fallback_ratio_max)] if policy.has_graphs else []),
        *(Check(name, getattr(evidence, name) == 0, str(getattr(evidence, name)), "0") for name in ZERO_COUNTERS),
    ]
    if not policy.accept_synthetic:
        found = whole.evidence_class if whole else "no cells"
        checks.append(Check("evidence_class", found == MEASURED, found, MEASURED))
    shown = {pair for cell in evidence.cells for pair in cell.axes}
    checks += [
        Check(
            f"coverage: {axis}={value}", (axis, value) in shown, "covered" if (axis, value) in shown else "no cell", ""
        )
        for axis, value in policy.must_cover
    ]
    readings = dict(evidence.readings)
    checks += [gate.check(readings.get(gate.name)) for gate in policy.gates]
    return PromotionReport(policy, evidence, tuple(checks))


def _nothing(name: str, wrong: tuple[str, ...]) -> Check:
    return Check(name, not wrong, ", ".join(wrong) or "nothing", "nothing")


def _at_least(name: str, found: int, least: int) -> Check:
    return Check(name, found >= least, str(found), f">= {least}")


def _at_most(name: str, ratio: Ratio | None, most: Fraction) -> Check:
    if ratio is None or ratio.denominator.value == 0:
        return Check(name, False, str(ratio) if ratio else "no cells", f"<= {most}")
    return Check(name, ratio.value <= most, str(ratio), f"<= {most}")
