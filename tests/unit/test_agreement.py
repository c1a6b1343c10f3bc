"""The step agreement: pure, the same on every peer, refused by name when peers contradict one another."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.comm.agreement import Agreement, StepRecord, agree
from ray_moe.errors import AgreementError
from tests.layers import untimed

RECORD = StepRecord(
    release64=11,
    header64=2**63 - 1,
    generation=4,
    epoch=2,
    step=7,
    prefill_rows=0,
    decode_rows=0,
    has_work=0,
    stop=0,
    staged_generation=4,
    staged_epoch=2,
)
FLAG = st.integers(0, 1)


def peer(**changes: int) -> StepRecord:
    return dataclasses.replace(RECORD, **changes)


@st.composite
def records(draw: st.DrawFn) -> list[StepRecord]:
    """What one to five healthy peers offer for one step."""
    return [
        peer(
            prefill_rows=draw(st.integers(0, 300)),
            decode_rows=draw(st.integers(0, 64)),
            has_work=draw(FLAG),
            stop=draw(FLAG),
            staged_generation=draw(st.integers(4, 9)),
            staged_epoch=draw(st.integers(2, 5)),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]


@untimed
@given(records())
def test_an_agreement_is_what_the_peers_offered(offered: list[StepRecord]) -> None:
    agreed = agree(offered)
    assert agreed == Agreement(
        step=7,
        prefill=sum(record.prefill_rows for record in offered) > 0,
        decode=sum(record.decode_rows for record in offered) > 0,
        rows_P=tuple(record.prefill_rows + record.decode_rows for record in offered),
        has_work=1 in [record.has_work for record in offered],
        stop=0 not in [record.stop for record in offered],
        generation=sorted(record.staged_generation for record in offered)[0],
        epoch=sorted(record.staged_epoch for record in offered)[0],
        most_prefill_rows=sorted(record.prefill_rows for record in offered)[-1],
        most_decode_rows=sorted(record.decode_rows for record in offered)[-1],
    )


@untimed
@given(records(), st.data())
def test_only_the_rows_depend_on_who_sits_where(offered: list[StepRecord], data: st.DataObject) -> None:
    turned = data.draw(st.permutations(offered))
    assert dataclasses.replace(agree(turned), rows_P=()) == dataclasses.replace(agree(offered), rows_P=())


@untimed
@given(records(), st.data())
def test_one_peer_that_does_not_want_to_stop_keeps_all_going(offered: list[StepRecord], data: st.DataObject) -> None:
    willing = [dataclasses.replace(record, stop=1) for record in offered]
    assert agree(willing).stop
    hesitant = data.draw(st.integers(0, len(offered) - 1))
    willing[hesitant] = dataclasses.replace(willing[hesitant], stop=0)
    assert not agree(willing).stop


def test_a_staged_generation_takes_effect_when_the_last_peer_has_staged_it() -> None:
    assert agree([peer(staged_generation=6), peer(staged_generation=5), peer()]).generation == 4
    assert agree([peer(staged_generation=6), peer(staged_generation=5), peer(staged_generation=6)]).generation == 5
    assert agree([peer(staged_epoch=3), peer()]).epoch == 2
    assert agree([peer(staged_epoch=3), peer(staged_epoch=4)]).epoch == 3


@pytest.mark.parametrize("field", ["release64", "header64", "generation", "epoch", "step"])
@pytest.mark.parametrize("odd_one", [0, 1, 2])
def test_a_disagreement_in_any_shared_field_is_refused_with_the_field_and_the_peers(field: str, odd_one: int) -> None:
    offered = [RECORD] * 3
    offered[odd_one] = dataclasses.replace(RECORD, **{field: getattr(RECORD, field) - 1})
    with pytest.raises(AgreementError, match=f"peer slot 0 has {field} .*, peer slot {odd_one or 1} has"):
        agree(offered)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("prefill_rows", -1, "planned a negative number of rows"),
        ("decode_rows", -3, "planned a negative number of rows"),
        ("staged_generation", 3, "staged less than it serves"),
        ("staged_epoch", 1, "staged less than it serves"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(field: str, value: int, reason: str) -> None:
    with pytest.raises(AgreementError, match=f"step 7: peer slot 1 {reason}"):
        agree([RECORD, dataclasses.replace(RECORD, **{field: value})])


@untimed
@given(records())
def test_records_travel_as_one_integer_line_each(offered: list[StepRecord]) -> None:
    lines = torch.stack([record.to_tensor() for record in offered])
    assert lines.shape == (len(offered), 15)
    assert lines.dtype == torch.int64
    assert StepRecord.lines(lines) == tuple(offered)
