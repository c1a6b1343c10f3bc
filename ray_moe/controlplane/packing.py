"""The two greedy rules of the pinned EPLB solver, for every row of a batch at once.

`replicate` gives each further copy to the largest load / copies; `pack` deals items, heaviest first, to the lightest
pack with room. Both follow the reference exactly: loads are float32 and rounded wherever it rounds, equal loads take
the lowest index, and one item per pack is the identity. Letters: N rows, I items, E experts, S slots, P packs.

Loads are sorted as 64-bit keys, the float32 load in the high half (numbers >= 0 are ordered like their bits) and what
breaks ties in the low half: any sort of distinct keys is stable, and numpy's fastest one sorts them.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)  # the halves of a key
_NO_KEY = np.iinfo(np.int64).max
# glibc hands freed arrays back to the kernel until a larger block was freed once, and a fault for every page of the
# next arrays takes as long as the work on them.
np.empty(16 << 20, np.uint8)
_NORMAL = 1e-30  # far above the loads at which float32 quotients lose their relative precision


class Copies(NamedTuple):
    """Physical copies before they are packed: in every row first one of each expert, then the further ones."""

    expert_NS: Int64  # an index into all rows' experts: row * E + expert
    phyrank_NS: Int64
    logcnt_NE: Int64


def replicate(loads_NE: Float32, num_slots: int) -> Copies:
    """`num_slots` copies per row: each one above E to the largest float32 load / copies, ties to the lowest expert.

    The greedy choices are the largest `num_slots - E` of all quotients load / k, k >= 1, in the order (quotient
    descending, expert ascending, k ascending), as no expert's quotients rise with k. With W the row's total, at least
    that many are >= W / num_slots, and at most `num_slots`: no others are looked at.
    """
    rows, experts = loads_NE.shape
    extra = num_slots - experts
    first_NE = np.arange(rows * experts).reshape(rows, experts)
    if extra == 0:
        return Copies(first_NE, np.zeros_like(first_NE), np.ones_like(first_NE))

    reach_NE = _candidates(loads_NE, extra)
    reach, reach_N = reach_NE.ravel(), reach_NE.sum(axis=1)
    ends = np.cumsum(reach)
    total = int(ends[-1])
    expert_C = np.repeat(first_NE.ravel(), reach)
    k_C = np.arange(1, total + 1)
    k_C -= np.repeat(ends - reach, reach)
    quotient_C = loads_NE.ravel()[expert_C]
    quotient_C /= k_C.astype(np.float32)

    keys_NC = np.full((rows, int(reach_N.max())), _NO_KEY)
    keys_NC[np.arange(keys_NC.shape[1]) < reach_N[:, None]] = _descending_keys(quotient_C)
    keys_NC.sort(axis=1)
    chosen = _low(keys_NC[:, :extra])

    expert_NS, phyrank_NS = np.empty((rows, num_slots), np.int64), np.zeros((rows, num_slots), np.int64)
    expert_NS[:, :experts] = first_NE
    expert_NS[:, experts:] = expert_C[chosen]
    phyrank_NS[:, experts:] = k_C[chosen]
    return Copies(expert_NS, phyrank_NS, np.bincount(expert_NS.ravel()).reshape(rows, experts))


def _candidates(loads_NE: Float32, extra: int) -> Int64:
    """[N, E]: how many of each expert's quotients, the largest first, can be among the row's `extra` largest."""
    bound_N = loads_NE.sum(axis=1, dtype=np.float64) / (loads_NE.shape[1] + extra)
    tiny_N = bound_N < _NORMAL
    bound_N *= 1 - 1e-6  # far more than rounding can move a quotient across it
    bound_N[tiny_N] = np.inf
    reach_NE = (loads_NE / bound_N[:, None]).astype(np.int64)
    if tiny_N.any():
        reach_NE[tiny_N] = extra
        reach_NE[~loads_NE.any(axis=1), 1:] = 0  # no load at all: the first expert's
    return reach_NE


def pack(weights_NI: Float32, packs: int) -> Int64:
    """[N, I]: the item at each place, I / packs places per pack, pack after pack; row * I + item, an index into all.

    Heaviest first, each item goes to the lightest pack that has room, in the order of arrival there.
    """
    rows, items = weights_NI.shape
    room = items // packs
    base_N1 = (np.arange(rows) * items)[:, None]
    if room == 1:
        return base_N1 + np.arange(items)
    keys_NI = _descending_keys(weights_NI)
    keys_NI.sort(axis=1)
    order_NI = _low(keys_NI)
    if packs == 1:
        return order_NI
    place_NI = _rounds(_load(keys_NI ^ (0x7FFFFFFF << 32)), packs)
    place_NI += base_N1
    held = np.empty(rows * items, np.int64)
    held[place_NI.ravel()] = order_NI.ravel()
    return held.reshape(rows, items)


def _rounds(sorted_NI: Float32, packs: int) -> Int64:
    """[N, I]: the place, pack * room + number, that each item gets.

    A pack is a key: its load, then pack * room + items held, so that the smallest key is the next to be chosen. While
    the heaviest pack is lighter than any other becomes by one more item, the next P items go to the P packs in order
    of their keys: one addition and one sort for all rows. This holds for nearly all rounds, as replication leaves items
    of like weight; rows where it ends go on item by item. The last round fills every pack in any case.
    """
    rows, items = sorted_NI.shape
    room = items // packs
    keys_NP = np.broadcast_to(np.arange(0, items, room), (rows, packs))
    new_RNP = np.empty((room, rows, packs), np.int64)
    load_RNP, sorted_NRP = _load(new_RNP), sorted_NI.reshape(rows, room, packs)
    even_N, rounds_N = np.ones(rows, np.bool_), np.zeros(rows, np.int64)
    for index in range(room):
        new_NP, load_NP = new_RNP[index], load_RNP[index]
        np.add(keys_NP, 1, out=new_NP)
        np.add(load_NP, sorted_NRP[:, index], out=load_NP)
        if index < room - 1:
            even_N &= keys_NP[:, -1] < np.minimum.reduce(new_NP[:, :-1], axis=1)
            keys_NP = np.sort(new_NP, axis=1)
        rounds_N += even_N
    place_NI = _low(new_RNP.transpose(1, 0, 2)).reshape(rows, items)

    if not even_N.all():
        uneven = np.flatnonzero(~even_N)
        start = int(rounds_N.min())
        if start:
            keys_NP = np.sort(new_RNP[start - 1, uneven], axis=1)
        else:
            keys_NP = np.broadcast_to(np.arange(0, items, room), (len(uneven), packs))
        rest_IN = np.ascontiguousarray(sorted_NI[uneven, start * packs :].T)
        place_NI[uneven, start * packs :] = _one_by_one(rest_IN, keys_NP.T, room).T
    place_NI -= 1
    return place_NI


def _one_by_one(sorted_IN: Float32, keys_PN: Int64, room: int) -> Int64:
    """[I, N]: one more than the place of each item, from the packs' sorted keys, until all packs are full.

    The next item goes to the first pack, whose new key is inserted among the others by one minimum and one maximum.
    """
    items, rows = sorted_IN.shape
    packs = len(keys_PN)
    now, then = np.full((2, packs + 1, rows), _NO_KEY)
    now[:packs] = keys_PN
    when_full = np.zeros(packs * room + 1, np.float32)
    when_full[room::room] = np.inf
    new_IN = np.empty((items, rows), np.int64)
    for new, load, place, weight in zip(new_IN, _load(new_IN), _halves(new_IN)[..., _LOW], sorted_IN, strict=True):
        np.add(now[0], 1, out=new)
        np.add(load, weight, out=load)
        np.add(load, when_full[place], out=load)
        np.minimum(now[1:], new, out=then[:packs])
        np.maximum(now[1:packs], then[1:packs], out=then[1:packs])
        now, then = then, now
    return _low(new_IN)


# -- Keys


def _descending_keys(loads: Float32) -> Int64:
    """Keys of loads [..., I] that sort the largest first and equal ones by ascending index over all dimensions."""
    keys = np.empty(loads.shape, np.int64)
    halves = _halves(keys)
    halves[..., _LOW] = np.arange(loads.size, dtype=np.uint32).reshape(loads.shape)
    halves[..., _HIGH] = loads.view(np.uint32)
    halves[..., _HIGH] ^= np.uint32(0x7FFFFFFF)
    return keys


def _halves(keys: Int64, dtype: Any = np.uint32) -> NDArray[Any]:
    return keys.view(dtype).reshape(*keys.shape, 2)


def _load(keys: Int64) -> Float32:
    """A view of the loads in the keys."""
    return _halves(keys, np.float32)[..., _HIGH]


def _low(keys: Int64) -> Int64:
    return keys & 0xFFFFFFFF
