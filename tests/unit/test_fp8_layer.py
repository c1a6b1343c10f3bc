"""FP8 dispatch through the layer over real peers: what the experts get, how far that moves a result, and its bytes.

Letters: T tokens, D hidden, F FFN, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.join import transport_named
from ray_moe.comm.solo import SoloGroup
from ray_moe.dataplane.handle import HandleABI
from ray_moe.dataplane.layer import ExpertLayer, Invocation
from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.precision import Fp8Block, Fp8Row, PayloadCodec, codec_named, payload_bytes
from ray_moe.dataplane.runners import runner_named
from ray_moe.errors import CountMismatchError
from ray_moe.evidence import RowSlots
from ray_moe.identity import GlobalRank
from ray_moe.routes import Routes
from tests.layers import ONE_PEER, Experts, layer_on, named, placement, random_routes, untimed
from tests.peers import TRANSPORTS, Peers, peers, transport_over

__all__ = ["peers"]

# A width with one whole block of 128 and a ragged one.
EXPERTS, TOP_K, HIDDEN, FFN = 5, 2, 160, 6
HOMES = {2: [(0, 1), (1, 0), (2, 1), (3, 0), (4, 1), (0, 0)], 3: [(0, 2), (1, 0), (2, 1), (3, 2), (4, 0), (0, 0)]}
ORDERS = {2: (1, 0), 3: (2, 0, 1)}
TOKENS = {2: [(5, 3), (0, 4), (0, 0)], 3: [(4, 0, 6), (0, 0, 1), (2, 2, 2)]}
FORMATS = ("fp8_row", "fp8_block")
# fp32 sums of 160 products, in another order than the oracle's; results are of size one.
FP32: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
# |silu'| is at most 1.0999 (at x = 2.4).
SILU_SLOPE = 1.1


def hidden_of(peer: int, tokens: int) -> Tensor:
    """Rows whose elements differ in size by four orders of magnitude, so that blocks matter."""
    generator = torch.Generator().manual_seed(100 * peer + tokens)
    size = 10 ** -(4 * torch.rand(tokens, HIDDEN, generator=generator))
    return torch.randn(tokens, HIDDEN, generator=generator) * size


def inputs(peer: int, tokens: int) -> tuple[Tensor, Routes]:
    return hidden_of(peer, tokens), random_routes(peer + tokens, tokens, TOP_K, EXPERTS)


def weights() -> Experts:
    return Experts.random(EXPERTS, HIDDEN, FFN, bias=True)


def layer_of(
    group: ExpertGroup, abi: HandleABI, transport: str = "all_to_all_v", strategy: str = "bulk"
) -> ExpertLayer:
    return layer_on(
        placement(HOMES[len(group.spec)], group.spec),
        group.spec.peers[group.peer_slot].value,
        weights(),
        transport_over(group, transport),
        runner_named("grouped"),
        policy_named("token_hash"),
        abi,
        strategy,
    )


@dataclass(frozen=True)
class Forwarded:
    outs: list[Tensor]
    sent: int
    rows_sent: int
    rows_received: int


def forwards(group: ExpertGroup, abi: HandleABI, ways: Sequence[tuple[str, str]]) -> list[Forwarded]:
    """Each (transport, strategy) in turn, not audited: the wire carries payload alone."""
    got = []
    for transport, strategy in ways:
        layer = layer_of(group, abi, transport, strategy)
        before = layer.path.transport.bytes_moved[0]
        outs = [
            layer.forward(*inputs(group.peer_slot, tokens_P[group.peer_slot]), Invocation(step, "bare"))
            for step, tokens_P in enumerate(TOKENS[len(group.spec)])
        ]
        sent = layer.path.transport.bytes_moved[0] - before
        got.append(Forwarded(outs, sent, layer.counters.rows_sent, layer.counters.rows_received))
    return got


def codec_of(format: str) -> PayloadCodec:
    return codec_named(format, HIDDEN, torch.float32)


def through(codec: PayloadCodec, hidden_TD: Tensor) -> Tensor:
    """Quantized and back."""
    return codec.decode(codec.encode(hidden_TD), hidden_TD.dtype)


# -- What the experts get


@pytest.mark.parametrize("num_peers", [2, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_the_result_is_the_dense_one_of_the_rows_as_they_are_on_the_wire(
    peers: Peers, format: str, num_peers: int
) -> None:
    ways = [*((transport, "bulk") for transport in TRANSPORTS), ("all_to_all_v", "chunk_pipeline")]
    got = peers.run(forwards, HandleABI(payload_format=format), ways, ranks=ORDERS[num_peers])
    for peer, by_way in enumerate(got):
        for way, ran in zip(ways, by_way, strict=True):
            for tokens_P, out, usual in zip(TOKENS[num_peers], ran.outs, by_way[0].outs, strict=True):
                hidden_TD, routes = inputs(peer, tokens_P[peer])
                expected = weights().dense(through(codec_of(format), hidden_TD), routes)
                torch.testing.assert_close(out, expected, **FP32, msg=named((way, tokens_P)))
                if way[1] == "bulk":
                    assert torch.equal(out, usual), "how rows travel changes no bit"


def poisoned(group: ExpertGroup, format: str) -> tuple[Tensor, Tensor]:
    layer = layer_of(group, HandleABI(payload_format=format))
    hidden_TD, routes = inputs(group.peer_slot, 4)
    clean = layer.forward(hidden_TD, routes, Invocation(0, "bare"))
    hidden_TD[1, 3] = torch.inf
    return clean, layer.forward(hidden_TD, routes, Invocation(1, "bare"))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_that_is_not_finite_spoils_its_own_token_only(peers: Peers, format: str) -> None:
    for clean, spoilt in peers.run(poisoned, format, ranks=ORDERS[3]):
        others = torch.tensor([0, 2, 3])
        assert torch.equal(spoilt[others], clean[others])
        assert spoilt[1].isnan().all()


# -- How far that moves a result


def moved_at_most(format: str, hidden_TD: Tensor) -> Tensor:
    """By how much quantizing may move each element [T, D], in fp64.

    FP8 keeps three mantissa bits, so an element x moves by at most half a step: |x| / 16, or scale / 1024 where
    x / scale is subnormal; fp32 divides and multiplies on the way, 2^-22 of x. The scale is amax / 448 of its block.
    """
    block = HIDDEN if format == "fp8_row" else 128
    size_TD = hidden_TD.double().abs()
    bound_TD = torch.empty_like(size_TD)
    for start in range(0, HIDDEN, block):
        columns = slice(start, start + block)
        scale_T1 = size_TD[:, columns].amax(dim=1, keepdim=True) / 448
        bound_TD[:, columns] = torch.maximum(size_TD[:, columns] / 16, scale_T1 / 1024) + size_TD[:, columns] * 2**-22
    return bound_TD


def result_moves_at_most(experts: Experts, routes: Routes, hidden_TD: Tensor, moved_TD: Tensor) -> Tensor:
    """By how much each element of the result [T, D] may move when the rows move by `moved_TD`, in fp64.

    Gate and up columns move by a and b, at most |W| times the rows' bound. Then silu(g) * u moves by at most
    slope * a * (|u| + b) + |silu(g)| * b, the second projection passes |W| of that on, and gates weight it.
    """
    rows_TD, bound_TD = hidden_TD.double(), torch.zeros(hidden_TD.shape, dtype=torch.float64)
    assert experts.gate_up_bias is not None
    for token in range(routes.num_tokens):
        for expert, gate in zip(routes.topk_ids[token].tolist(), routes.topk_weights[token].tolist(), strict=True):
            gate_up, down = experts.gate_up[expert].double(), experts.down[expert].double()
            g, u = (gate_up @ rows_TD[token] + experts.gate_up_bias[expert].double()).chunk(2)
            a, b = (gate_up.abs() @ moved_TD[token]).chunk(2)
            inner = SILU_SLOPE * a * (u.abs() + b) + functional.silu(g).abs() * b
            bound_TD[token] += gate * (down.abs() @ inner)
    return bound_TD


def test_the_slope_of_silu_is_bounded_by_the_constant() -> None:
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(functional.silu(x).sum(), x)
    assert 1.09 < float(slope.abs().max()) < SILU_SLOPE


@pytest.mark.parametrize("num_peers", [2, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_the_error_against_the_unquantized_result_is_within_the_derived_bound(
    peers: Peers, format: str, num_peers: int
) -> None:
    got = peers.run(forwards, HandleABI(payload_format=format), [("all_to_all_v", "bulk")], ranks=ORDERS[num_peers])
    largest = 0.0
    for peer, (ran,) in enumerate(got):
        for tokens_P, out in zip(TOKENS[num_peers], ran.outs, strict=True):
            hidden_TD, routes = inputs(peer, tokens_P[peer])
            exact = weights().dense(hidden_TD, routes).double()
            moved_TD = moved_at_most(format, hidden_TD)
            assert bool(((through(codec_of(format), hidden_TD) - hidden_TD).double().abs() <= moved_TD).all())
            bound_TD = result_moves_at_most(weights(), routes, hidden_TD, moved_TD)
            # The oracle's and the layer's own fp32 rounding come on top, on either side.
            assert bool(((out - exact).abs() <= bound_TD + 2e-5).all())
            largest = max([largest, *(out - exact).abs().flatten().tolist()])
    assert largest > 1e-3, "rows were quantized at all"


@settings(untimed, derandomize=True)
@given(st.sampled_from(FORMATS), st.integers(0, 9999), st.floats(-30, 30), st.integers(0, 3))
def test_no_element_moves_further_than_the_bound_says(format: str, seed: int, exponent: float, zeros: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, HIDDEN, generator=generator) * 10 ** (exponent * torch.rand(3, HIDDEN, generator=generator))
    rows[:, : 50 * zeros] = 0
    moved = (through(codec_of(format), rows).double() - rows.double()).abs()
    assert bool((moved <= moved_at_most(format, rows)).all())


# -- What it costs, and what it needs


@pytest.mark.parametrize("num_peers", [2, 3])
@pytest.mark.parametrize("payload", ["float32", "bfloat16"])
def test_the_bytes_moved_are_those_of_the_formats_payload(peers: Peers, payload: str, num_peers: int) -> None:
    """Rows out in the format, scales among them; rows back in the return dtype, whatever the format."""
    dense = HandleABI(return_dtype=payload)
    size = dense.returned.itemsize
    moved = {}
    for format in FORMATS:
        abi = HandleABI(payload_format=format, return_dtype=payload)
        for peer, (ran,) in enumerate(peers.run(forwards, abi, [("all_to_all_v", "bulk")], ranks=ORDERS[num_peers])):
            out_bytes = payload_bytes(format, RowSlots(ran.rows_sent), HIDDEN)
            assert ran.sent == int(out_bytes) + ran.rows_received * HIDDEN * size
            moved[format, peer] = ran.sent
    for peer, (ran,) in enumerate(peers.run(forwards, dense, [("all_to_all_v", "bulk")], ranks=ORDERS[num_peers])):
        assert ran.rows_sent > 0
        for format in FORMATS:
            codec = codec_of(format)
            assert isinstance(codec, Fp8Row | Fp8Block)
            saved = ran.rows_sent * (4 * HIDDEN - codec.wire_width)
            assert moved[format, peer] == ran.sent - saved


@dataclass(frozen=True)
class Refused:
    message: str
    moved: int
    afterwards: Tensor


def formats_differ(group: ExpertGroup, formats: Sequence[str]) -> Refused:
    layer = layer_of(group, HandleABI(payload_format=formats[group.peer_slot]))
    before = group.bytes_sent + group.bytes_received
    with pytest.raises(CountMismatchError) as caught:
        layer.forward(*inputs(group.peer_slot, 3), Invocation(0, "bare"))
    moved = group.bytes_sent + group.bytes_received - before
    healthy = layer_of(group, HandleABI(payload_format="fp8_row"))
    return Refused(str(caught.value), moved, healthy.forward(*inputs(group.peer_slot, 3), Invocation(1, "bare")))


@pytest.mark.parametrize(
    "formats",
    [("fp8_row", "fp8_block"), ("native", "fp8_block"), ("fp8_row", "native", "native"), ("native", *FORMATS)],
    ids=str,
)
def test_peers_with_different_formats_refuse_one_another_before_any_payload(
    peers: Peers, formats: tuple[str, ...]
) -> None:
    for peer, answer in enumerate(peers.run(formats_differ, formats, ranks=ORDERS[len(formats)])):
        assert "is at header/invocation" in answer.message
        assert answer.moved == 0
        hidden_TD, routes = inputs(peer, 3)
        torch.testing.assert_close(
            answer.afterwards, weights().dense(through(codec_of("fp8_row"), hidden_TD), routes), **FP32
        )


@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_stay_at_home_are_represented_like_those_that_travel(format: str) -> None:
    """A result must not depend on where an expert lives."""
    group = SoloGroup(ONE_PEER, GlobalRank(0))
    layer = layer_on(
        placement([(expert, 0) for expert in range(EXPERTS)], ONE_PEER),
        0,
        weights(),
        transport_named("all_to_all_v", group),
        runner_named("grouped"),
        policy_named("token_hash"),
        HandleABI(payload_format=format),
    )
    hidden_TD, routes = inputs(0, 6)
    out_TD = layer.forward(hidden_TD, routes, Invocation(0, "bare", audit=True))
    torch.testing.assert_close(out_TD, weights().dense(through(codec_of(format), hidden_TD), routes), **FP32)
    assert (group.bytes_sent, group.bytes_received) == (0, 0)
