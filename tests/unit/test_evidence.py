"""Five ledgers that do not add up, and claims that need what supports them: at run time, and for a type checker."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mypy import api as mypy

from ray_moe.dataplane.ledger import (
    ControlBytes,
    DeviceLaunches,
    HandleBytes,
    HostSubmissions,
    MatmulFlops,
    RemoteBytes,
    StagingBytes,
)
from ray_moe.errors import EvidenceError
from ray_moe.evidence import (
    Elapsed,
    Instrument,
    LiveBytes,
    LogicalBytes,
    MeasuredBytes,
    Measurement,
    QualityClaim,
    RowSlots,
    SourceClaim,
    Speedup,
    Units,
)
from tests.layers import untimed

ROOT = Path(__file__).resolve().parents[2]
AMOUNTS: list[Any] = [
    RowSlots,
    LogicalBytes,
    LiveBytes,
    Units,
    StagingBytes,
    RemoteBytes,
    HandleBytes,
    ControlBytes,
    MatmulFlops,
    HostSubmissions,
    DeviceLaunches,
]
CLOCK = Measurement(Instrument.CLOCK, "3 warm-ups, median of 20", "run-1", {"tokens": "64"})
COUNTER = Measurement(Instrument.GROUP_COUNTER, "one call", "run-1")


# -- Amounts


@untimed
@given(st.sampled_from(AMOUNTS), st.integers(0, 1 << 60), st.integers(0, 1 << 60))
def test_amounts_of_one_ledger_add_up_and_compare(ledger: Any, one: int, other: int) -> None:
    assert ledger(one) + ledger(other) == ledger(one + other)
    assert type(ledger(one) + ledger(other)) is ledger
    assert (ledger(one) < ledger(other)) == (one < other)
    assert int(ledger(one)) == one


@pytest.mark.parametrize("other", AMOUNTS)
@pytest.mark.parametrize("one", AMOUNTS)
def test_amounts_of_two_ledgers_neither_add_up_nor_compare(one: Any, other: Any) -> None:
    if one is other:
        return
    with pytest.raises(EvidenceError, match=f"^{one.__name__} and {other.__name__} are two ledgers"):
        one(1) + other(1)
    assert one(1) != other(1)
    with pytest.raises(TypeError):
        operator.lt(one(1), other(2))


@pytest.mark.parametrize("other", [1, 1.0, Elapsed(1.0, CLOCK), MeasuredBytes(1, COUNTER), None])
@pytest.mark.parametrize("ledger", AMOUNTS)
def test_an_amount_adds_to_no_plain_and_to_no_measured_number(ledger: Any, other: Any) -> None:
    with pytest.raises(EvidenceError, match=f"^{ledger.__name__} and {type(other).__name__} are two ledgers"):
        ledger(1) + other
    with pytest.raises(TypeError):
        other + ledger(1)


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None])
@pytest.mark.parametrize("ledger", AMOUNTS)
def test_an_amount_is_a_whole_number_that_is_not_negative(ledger: Any, value: Any) -> None:
    with pytest.raises(EvidenceError, match=f"^{ledger.__name__} must be a whole number >= 0, found {value!r}"):
        ledger(value)


def test_schedule_units_print_as_units_and_as_nothing_else() -> None:
    assert (str(Units(15)), f"{Units(15)}") == ("15 units", "15 units")
    for spec in (".1f", "d", ">8"):
        with pytest.raises(EvidenceError, match="schedule units are no clock time"):
            format(Units(15), spec)


# -- Measured values


@pytest.mark.parametrize("missing", ["protocol", "artifact"])
def test_a_measurement_names_what_measured_how_and_where(missing: str) -> None:
    with pytest.raises(EvidenceError, match=f"a measurement needs its {missing}"):
        dataclasses.replace(CLOCK, **{missing: ""})  # type: ignore[arg-type]


@pytest.mark.parametrize("measurement", [None, "NVLink", Units(3), SourceClaim("s", "f.py", "abc", "takes 3 ms")])
@pytest.mark.parametrize("measured", [Elapsed, MeasuredBytes])
def test_only_a_measurement_gives_a_measured_value(measured: Any, measurement: Any) -> None:
    found = type(measurement).__name__
    with pytest.raises(EvidenceError, match=f"^{measured.__name__} needs the measurement that gave it, found {found}$"):
        measured(3, measurement)
    assert measured(3, CLOCK).measurement is CLOCK


def test_a_speed_up_is_the_ratio_of_two_times_measured_alike() -> None:
    assert Speedup(Elapsed(3.0, CLOCK), Elapsed(1.5, CLOCK)).ratio == 2.0


@pytest.mark.parametrize("given_", [Units(3), RowSlots(3), MatmulFlops(3), MeasuredBytes(3, COUNTER), 3.0, None])
def test_a_speed_up_takes_nothing_but_measured_times(given_: Any) -> None:
    for arguments in ((given_, Elapsed(1.0, CLOCK)), (Elapsed(1.0, CLOCK), given_)):
        with pytest.raises(EvidenceError, match=f"compares two measured times, found {type(given_).__name__}"):
            Speedup(*arguments)


@pytest.mark.parametrize("conditions", [{"tokens": "128"}, {}, {"tokens": "64", "gpu": "H200"}])
def test_a_speed_up_holds_its_conditions(conditions: dict[str, str]) -> None:
    other = Measurement(Instrument.CLOCK, "3 warm-ups, median of 20", "run-2", conditions)
    for pair in ((CLOCK, other), (other, CLOCK)):
        with pytest.raises(EvidenceError, match=r"a speed-up holds its conditions constant: (tokens|gpu) was"):
            Speedup(Elapsed(2.0, pair[0]), Elapsed(1.0, pair[1]))


# -- Claims


def test_a_quality_claim_names_its_evaluation() -> None:
    with pytest.raises(EvidenceError, match="'fp8 keeps quality' needs an evaluation artifact"):
        QualityClaim("fp8 keeps quality", "")
    assert QualityClaim("fp8 keeps quality", "eval-9").evaluation == "eval-9"


@pytest.mark.parametrize("missing", ["surface", "file", "revision"])
def test_a_claim_about_source_names_its_surface_file_and_revision(missing: str) -> None:
    complete = {"surface": "DeepEP", "file": "buffer.py", "revision": "abc", "statement": "it overlaps"}
    SourceClaim(**complete)
    with pytest.raises(EvidenceError, match=f"a claim about source names its {missing}: 'it overlaps'"):
        SourceClaim(**{**complete, missing: ""})


# -- For a type checker: each line marked `refused` is an error, and no other line is

SNIPPET = """
from ray_moe.dataplane.ledger import ByteSchema, DeviceLaunches, HostSubmissions, MatmulFlops, RemoteBytes, RouteRows
from ray_moe.dataplane.ledger import StagingBytes, allocated_bytes, peak, swiglu_matmul_flops
from ray_moe.evidence import (
    Elapsed, Instrument, LiveBytes, LogicalBytes, MeasuredBytes, Measurement, QualityClaim, RowSlots, SourceClaim,
    Speedup, Units,
)

clock = Measurement(Instrument.CLOCK, "median of 20", "run-1")
comment = SourceClaim("DeepEP", "buffer.py", "abc", "takes 3 ms")
schema, rows = ByteSchema(), RouteRows(local=RowSlots(2), remote=RowSlots(6))

more: RowSlots = RowSlots(1) + RowSlots(2)
remote: RemoteBytes = schema.remote_dispatch(rows, 3) + schema.combine_metadata(rows)
logical: LogicalBytes = remote
seconds: float = Speedup(Elapsed(2.0, clock), Elapsed(1.0, clock)).ratio
traffic = MeasuredBytes(int(remote), clock)

RowSlots(1) + LogicalBytes(2)  # refused
LogicalBytes(1) + LiveBytes(2)  # refused
LiveBytes(1) + 2  # refused
Units(1) + RowSlots(2)  # refused
RowSlots(1) < LiveBytes(2)  # refused
Elapsed(1.0, clock) + Elapsed(2.0, clock)  # refused
LogicalBytes(1) + traffic  # refused
late: Elapsed = Units(3)  # refused
fast: Elapsed = swiglu_matmul_flops(RowSlots(8), 3, 4)  # refused
Elapsed(Units(3), clock)  # refused
Elapsed(MatmulFlops(576), clock)  # refused
Elapsed(1.0, comment)  # refused
MeasuredBytes(logical, clock)  # refused
MeasuredBytes(48, "NVLink")  # refused
Speedup(Units(3), Units(2))  # refused
QualityClaim("fp8 keeps quality")  # refused
wire: RemoteBytes = schema.staging_dispatch(rows.staged, 3)  # refused
schema.remote_dispatch(rows.staged, 3)  # refused
remote + StagingBytes(2)  # refused
peak([])[0] + allocated_bytes([])  # refused
kernels: DeviceLaunches = HostSubmissions(1)  # refused
"""


def lines_that(marked: Callable[[str], object]) -> set[int]:
    return {number for number, line in enumerate(SNIPPET.splitlines(), start=1) if marked(line)}


def test_a_type_checker_refuses_the_same_mistakes(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    source, config = tmp_path / "snippet.py", tmp_path / "mypy.ini"
    source.write_text(SNIPPET)
    # torch's own types take long to read and are of no interest here.
    config.write_text(f"[mypy]\nmypy_path = {ROOT}\nstrict_equality = True\n[mypy-torch.*]\nfollow_imports = skip\n")
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("mypy-of-evidence")
    out, err, _ = mypy.run([str(source), "--config-file", str(config), "--cache-dir", str(cache), "--no-color-output"])
    found = [re.match(r"(.*):(\d+): error: ", line) for line in out.splitlines()]
    errors = [(match[1], int(match[2])) for match in found if match]
    assert {Path(file).name for file, _ in errors} == {source.name}, out + err
    assert {line for _, line in errors} == lines_that(lambda line: line.endswith("# refused")), out
