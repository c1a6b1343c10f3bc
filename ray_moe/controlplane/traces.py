"""Demand over time: seeded generators, and recorded traces. Pure: bytes in, bytes out, the seed is an argument.

A step of a trace is the routes of every expert of every layer, [L, E]. Generators make one step after the other and
hold O(L x E), so that a trace may be as long as one likes. They draw nothing but uniform doubles from numpy's PCG64, as
its other distributions may change with its version, and round to whole routes.
Letters: T steps, L layers, E experts, M kinds of prompts.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ray_moe.errors import ConfigError

Floats = NDArray[np.float64]
_FORMAT = 1


@dataclass(frozen=True)
class Recipe:
    """All that a generated trace follows from. `routes` are those of one layer in one step, on average.

    Popularity is Zipf's law with `exponent` over a shuffled order of experts, one per layer. At a shift, which comes
    every `shift_every` steps within a quarter, `shift_share` of the experts change places (drift) or the mix of prompts
    is drawn anew (prompt_mix). `drift_spread` and `drift_steps` are deviation and memory of the slow change of log
    popularity in between (drift). A burst multiplies one expert per layer by `burst_factor` for `burst_steps`. `period`
    is the day of diurnal, and `prompts` the number of prompt kinds, each with an order of experts of its own.

    Raises `ConfigError` naming the field, its value and its bound.
    """

    generator: str
    seed: int
    steps: int
    layers: int
    experts: int
    routes: int
    exponent: float = 1.0
    shift_every: int = 500
    shift_share: float = 0.25
    drift_spread: float = 0.2
    drift_steps: int = 1000
    burst_factor: float = 8.0
    burst_steps: int = 60
    period: int = 1000
    prompts: int = 4

    def __post_init__(self) -> None:
        if self.generator not in GENERATORS:
            raise ConfigError(f"generator: found {self.generator!r}, must be one of {', '.join(sorted(GENERATORS))}")
        least = {"steps": 1, "layers": 1, "experts": 1, "routes": 1, "prompts": 1, "shift_every": 2, "period": 2}
        least |= {"seed": 0, "exponent": 0, "drift_spread": 0, "drift_steps": 1, "burst_steps": 1, "burst_factor": 1}
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ConfigError(f"{name}: found {getattr(self, name)}, must be >= {bound}")
        if not 0 <= self.shift_share <= 1:
            raise ConfigError(f"shift_share: found {self.shift_share}, must be in [0, 1]")


@dataclass(frozen=True, eq=False)
class Trace:
    """Loads [L, E] (float64, whole routes) of one step after the other; iterating starts anew each time.

    `shifts` are the steps from which on demand is another, as the generator or the recorder says. `recipe` is None for
    a trace that was observed.
    """

    name: str
    steps: int
    layers: int
    experts: int
    shifts: tuple[int, ...]
    recipe: Recipe | None
    _start: Callable[[], Iterator[Floats]]

    def __iter__(self) -> Iterator[Floats]:
        return self._start()

    @classmethod
    def generated(cls, recipe: Recipe) -> Trace:
        generator = GENERATORS[recipe.generator]
        shifts = tuple(_shift_times(recipe)) if generator in _SHIFTING else ()
        name = f"{recipe.generator} seed {recipe.seed}"
        return cls(
            name,
            recipe.steps,
            recipe.layers,
            recipe.experts,
            shifts,
            recipe,
            lambda: generator(recipe, frozenset(shifts)),
        )

    @classmethod
    def recorded(
        cls, loads_TLE: ArrayLike, shifts: tuple[int, ...] = (), name: str = "recorded", recipe: Recipe | None = None
    ) -> Trace:
        """From whole numbers of routes. Raises `ConfigError` for another shape, and for loads that are none."""
        loads = np.asarray(loads_TLE)
        if loads.ndim != 3 or 0 in loads.shape:
            raise ConfigError(f"{name}: loads must be [steps, layers, experts], all >= 1, found {list(loads.shape)}")
        bad = ~((loads >= 0) & (loads <= np.iinfo(np.uint32).max) & (loads == np.floor(loads)))
        if bad.any():
            step, layer, expert = np.argwhere(bad)[0].tolist()
            raise ConfigError(
                f"{name}: step {step} layer {layer} expert {expert}: found {loads[step, layer, expert]}, must be a "
                f"whole number in [0, {np.iinfo(np.uint32).max}]"
            )
        steps, layers, experts = loads.shape
        if any(not 0 < shift < steps for shift in shifts) or list(shifts) != sorted(set(shifts)):
            raise ConfigError(f"{name}: shifts must ascend within (0, {steps}), found {list(shifts)}")
        kept = loads.astype(np.uint32)
        return cls(
            name, steps, layers, experts, shifts, recipe, lambda: (step_LE.astype(np.float64) for step_LE in kept)
        )

    def to_bytes(self) -> bytes:
        """A compressed .npz: `loads` uint32 [T, L, E] and `header`, JSON with name, shifts and recipe."""
        header = {
            "format": _FORMAT,
            "name": self.name,
            "unit": "routes",
            "shifts": list(self.shifts),
            "recipe": None if self.recipe is None else asdict(self.recipe),
        }
        largest = max(float(step_LE.max()) for step_LE in self)
        if largest > np.iinfo(np.uint32).max:
            raise ConfigError(
                f"{self.name}: loads of a saved trace must be <= {np.iinfo(np.uint32).max}, found {largest:.0f}"
            )
        file = io.BytesIO()
        loads = np.stack([step_LE.astype(np.uint32) for step_LE in self])
        np.savez_compressed(file, header=np.array(json.dumps(header)), loads=loads)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, source: str) -> Trace:
        """The inverse of `to_bytes`; `ConfigError` prefixed with `source` for anything else."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as archive:
                header: dict[str, Any] = json.loads(str(archive["header"]))
                loads = archive["loads"]
            if header["format"] != _FORMAT:
                raise ConfigError(f"{source}: format: found {header['format']!r}, must be {_FORMAT}")
            recipe = None if header["recipe"] is None else Recipe(**header["recipe"])
            name, shifts = str(header["name"]), tuple(int(shift) for shift in header["shifts"])
        except (ValueError, KeyError, TypeError, EOFError, OSError, zipfile.BadZipFile) as error:
            if isinstance(error, ConfigError):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(f"{source}: not a trace, an .npz with `header` and `loads` ({reason})") from error
        try:
            return cls.recorded(loads, shifts, name, recipe)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error


# -- Generators: one step after the other


def zipf(recipe: Recipe, shifts: frozenset[int]) -> Iterator[Floats]:
    """The same popularity throughout; steps differ by the chance of sampling alone."""
    draw = _Draws(recipe.seed)
    share_LE = _share(_zipf_logs(recipe, draw))
    for _ in range(recipe.steps):
        yield _routes(share_LE, recipe.routes, draw)


def drift(recipe: Recipe, shifts: frozenset[int]) -> Iterator[Floats]:
    """Log popularity wanders all the time, and at a shift part of the experts change places at once."""
    draw = _Draws(recipe.seed)
    log_LE = _zipf_logs(recipe, draw)
    wander_LE = recipe.drift_spread * draw.normal(log_LE.shape)
    keep = np.exp(-1 / recipe.drift_steps)
    for step in range(recipe.steps):
        if step in shifts:
            log_LE = _shuffled(log_LE, recipe.shift_share, draw)
        yield _routes(_share(log_LE + wander_LE), recipe.routes, draw)
        wander_LE = keep * wander_LE + np.sqrt(1 - keep**2) * recipe.drift_spread * draw.normal(log_LE.shape)


def bursts(recipe: Recipe, shifts: frozenset[int]) -> Iterator[Floats]:
    """At every shift one expert per layer, any of them, turns hot, and `burst_steps` later it is what it was."""
    draw = _Draws(recipe.seed)
    base_LE = _zipf_logs(recipe, draw)
    log_LE, ends = base_LE, -1
    for step in range(recipe.steps):
        if step == ends:
            log_LE = base_LE
        if step in shifts and step != ends:
            hot_L = (draw.uniform(recipe.layers) * recipe.experts).astype(np.int64)
            log_LE, ends = base_LE.copy(), step + recipe.burst_steps
            log_LE[np.arange(recipe.layers), hot_L] += np.log(recipe.burst_factor)
        yield _routes(_share(log_LE), recipe.routes, draw)


def diurnal(recipe: Recipe, shifts: frozenset[int]) -> Iterator[Floats]:
    """Two populations follow one another through a day; the night has half the routes of noon."""
    draw = _Draws(recipe.seed)
    noon_LE, night_LE = (_share(_zipf_logs(recipe, draw)) for _ in range(2))
    for step in range(recipe.steps):
        noon = 0.5 - 0.5 * np.cos(2 * np.pi * step / recipe.period)
        routes = recipe.routes * (2 + 2 * noon) / 3
        yield _routes(noon * noon_LE + (1 - noon) * night_LE, routes, draw)


def prompt_mix(recipe: Recipe, shifts: frozenset[int]) -> Iterator[Floats]:
    """Each kind of prompt has experts of its own; at a shift the mix of kinds is another."""
    draw = _Draws(recipe.seed)
    kinds_MLE = np.stack([_share(_zipf_logs(recipe, draw)) for _ in range(recipe.prompts)])
    mix_M = _mix(recipe.prompts, draw)
    for step in range(recipe.steps):
        if step in shifts:
            mix_M = _mix(recipe.prompts, draw)
        yield _routes(np.tensordot(mix_M, kinds_MLE, axes=1), recipe.routes, draw)


Generator = Callable[[Recipe, frozenset[int]], Iterator[Floats]]
GENERATORS: dict[str, Generator] = {g.__name__: g for g in (zipf, drift, bursts, diurnal, prompt_mix)}
_SHIFTING = (drift, bursts, prompt_mix)
RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))


def _shift_times(recipe: Recipe) -> Iterator[int]:
    """Shifts, and for bursts their ends as well, before the last step. A stream of its own: loads do not move them."""
    gaps = _Draws(recipe.seed, stream=1)
    at = 0
    for _ in count():
        at += max(1, round(recipe.shift_every * (0.75 + 0.5 * float(gaps.uniform(1)[0]))))
        if at >= recipe.steps:
            return
        yield at
        if recipe.generator == "bursts":
            at += recipe.burst_steps
            if at >= recipe.steps:
                return
            yield at


class _Draws:
    """Uniform doubles of a seed and a stream, and what is made of them."""

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._generator = np.random.Generator(np.random.PCG64([seed, stream]))

    def uniform(self, shape: int | tuple[int, ...]) -> Floats:
        return self._generator.random(shape)

    def normal(self, shape: tuple[int, ...]) -> Floats:
        """Box and Muller's transform: numpy's own normals may change from version to version."""
        radius = np.sqrt(-2 * np.log1p(-self.uniform(shape)))
        return radius * np.cos(2 * np.pi * self.uniform(shape))


def _zipf_logs(recipe: Recipe, draw: _Draws) -> Floats:
    """[L, E]: log popularity, a shuffled order per layer."""
    logs = np.broadcast_to(-recipe.exponent * np.log(np.arange(1, recipe.experts + 1)), (recipe.layers, recipe.experts))
    return np.take_along_axis(logs, draw.uniform(logs.shape).argsort(axis=1, kind="stable"), axis=1)


def _share(log_LE: Floats) -> Floats:
    weight_LE = np.exp(log_LE - log_LE.max(axis=1, keepdims=True))
    return weight_LE / weight_LE.sum(axis=1, keepdims=True)


def _routes(share_LE: Floats, routes: float, draw: _Draws) -> Floats:
    """Whole routes around their expectation, with the deviation of a count."""
    expected_LE = routes * share_LE
    return np.maximum(np.rint(expected_LE + np.sqrt(expected_LE) * draw.normal(expected_LE.shape)), 0)


def _shuffled(log_LE: Floats, share: float, draw: _Draws) -> Floats:
    """A `share` of each layer's experts, any of them, change places among themselves."""
    layers, experts = log_LE.shape
    chosen_LC = draw.uniform((layers, experts)).argsort(axis=1, kind="stable")[:, : round(share * experts)]
    order_LC = draw.uniform(chosen_LC.shape).argsort(axis=1, kind="stable")
    moved_LE = log_LE.copy()
    values_LC = np.take_along_axis(log_LE, np.take_along_axis(chosen_LC, order_LC, axis=1), axis=1)
    np.put_along_axis(moved_LE, chosen_LC, values_LC, axis=1)
    return moved_LE


def _mix(kinds: int, draw: _Draws) -> Floats:
    """Shares of the kinds of prompts, any point of the simplex alike."""
    weight_M = -np.log1p(-draw.uniform(kinds))
    return weight_M / weight_M.sum()
