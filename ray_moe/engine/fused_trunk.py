"""A trunk's small operations as our kernels, where these give what the modules' own code gives.

Norms, rotary embeddings and the choice of a router are five to ten launches each in transformers' code, on a few rows.
What a module is called says nothing: its own output on random rows decides whether a kernel takes its place, and a
module that no kernel agrees with keeps its code. Only this trunk's modules are changed, never their classes.

A rotary embedding must be equal bit for bit: every operation of it is rounded once, and so is the kernel's. A norm and
a router's gates cannot be: sums of another order and approximate divisions and exponentials differ in fp32, and the
rounding to half precision then goes to the neighbouring number in a few results of ten thousand. A router's gates may
be off by one unit in the last place, a norm's results by two (a neighbour, times a weight, may be two away), and only
few of them: another place of rounding would change a third.
"""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ray_moe.engine.joined_products import join_products
from ray_moe.kernels.trunk import rms_norm, rotate, softmax_top_k

_PROBE_ROWS = 24
_ROTARY = "apply_rotary_pos_emb"
_HALVES = (torch.bfloat16, torch.float16)
# One unit in the last place of a result (in fp32: what the order of a sum makes), how many of them results may be off
# by, and how many results in half precision may be off at all.
_ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
_NORM_ULPS, _ROUTER_ULPS, _ROTARY_ULPS = 2, 1, 0
_MOST_OFF = 0.05


@torch.inference_mode()
def fuse(model: PreTrainedModel) -> Counter[str]:
    """Give the modules of a trunk in half precision, on a device that runs kernels, their fused forwards.

    Returns how many norms, routers and rotary embeddings were taken, and in how many modules products were joined. A
    trunk in another precision keeps its code: in fp32 its sums are what tests compare.
    """
    taken: Counter[str] = Counter()
    if model.dtype not in _HALVES:
        return taken
    for module in model.modules():
        taken["norm"] += _take_first(module, _norms(module, model.dtype), _NORM_ULPS)
        taken["router"] += _take_first(module, _routers(module), _ROUTER_ULPS)
        taken["rotary"] += _take_rotary(module)
        taken["products"] += join_products(module)
    return taken


# A forward that may take the module's place, and arguments on which both must agree.
Candidate = tuple[Callable[..., Any], tuple[Any, ...]]


def _take_first(module: Any, candidates: Iterable[Candidate], ulps: int) -> bool:
    for forward, arguments in candidates:
        own = _tried(module.forward, *(argument.clone() for argument in arguments))
        if _agree(own, forward(*arguments), ulps):
            module.forward = forward
            return True
    return False


def _norms(module: nn.Module, dtype: torch.dtype) -> list[Candidate]:
    """Modules of one vector, in whatever precision, and an epsilon; rows are of `dtype`."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float) or _has_more(module, "weight"):
        return []
    epsilon = eps

    def candidate(rounded: bool) -> Candidate:
        def forward(hidden_states: Tensor) -> Tensor:
            return rms_norm(hidden_states, weight, epsilon, rounded=rounded)

        return forward, (_random(weight, 2, _PROBE_ROWS, weight.shape[0]).to(dtype),)

    return [candidate(True), candidate(False)]


def _routers(module: nn.Module) -> list[Candidate]:
    """Modules of one matrix whose rows are experts, that choose among them."""
    weight, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not isinstance(top_k, int) or _has_more(module, "weight"):
        return []
    if weight.dtype not in _HALVES:
        return []
    choose = top_k

    def candidate(renormalise: bool, gate_dtype: torch.dtype) -> Candidate:
        def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits_TE = F.linear(hidden_states.reshape(-1, weight.shape[1]), weight)
            gates_TK, ids_TK = softmax_top_k(logits_TE, choose, renormalise=renormalise, gate_dtype=gate_dtype)
            return logits_TE, gates_TK, ids_TK

        return forward, (_random(weight, _PROBE_ROWS, weight.shape[1]),)

    return [candidate(renormalise, dtype) for renormalise in (True, False) for dtype in (weight.dtype, torch.float32)]


def _take_rotary(module: Any) -> bool:
    """Of attention modules whose forward calls `apply_rotary_pos_emb` of its own file.

    The module gets its class's forward with another function under that name; the file keeps its own.
    """
    own = inspect.unwrap(type(module).forward)
    rotary = getattr(own, "__globals__", {}).get(_ROTARY)
    if "forward" in vars(module) or rotary is None or _ROTARY not in own.__code__.co_names or own.__closure__:
        return False
    weight, dim = next(module.parameters(), None), getattr(module, "head_dim", None)
    if weight is None or weight.dtype not in _HALVES or not isinstance(dim, int) or dim % 2:
        return False

    def fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if q.shape[0] != 1 or cos.shape != (1, q.shape[2], q.shape[3]) or unsqueeze_dim != 1:
            turned: tuple[Tensor, Tensor] = rotary(q, k, cos, sin, unsqueeze_dim)
            return turned
        query_HTD, key_HTD = rotate(_rows(q[0]), _rows(k[0]), _rows(cos[0]), _rows(sin[0]))
        return query_HTD[None], key_HTD[None]

    query, key = (_random(weight, 1, heads, _PROBE_ROWS, dim) for heads in (4, 2))
    angles = torch.linspace(0, 400, _PROBE_ROWS * dim // 2, device=weight.device).view(1, _PROBE_ROWS, dim // 2)
    cos, sin = (torch.cat((part, part), -1).to(weight.dtype) for part in (angles.cos(), angles.sin()))
    if not _agree(_tried(rotary, query, key, cos, sin), fused(query, key, cos, sin), _ROTARY_ULPS):
        return False
    code, names = own.__code__, {**own.__globals__, _ROTARY: fused}
    forward = types.FunctionType(code, names, own.__name__, own.__defaults__)
    forward.__kwdefaults__ = own.__kwdefaults__
    module.forward = types.MethodType(forward, module)
    return True


def _tried(function: Callable[..., Any], *arguments: Tensor) -> Any:
    """What a function, maybe of another kind, makes of our arguments; None where it wants others."""
    try:
        return function(*arguments)
    except (TypeError, RuntimeError, ValueError, IndexError):
        return None


def _agree(own: Any, ours: Any, ulps: int) -> bool:
    """Whether two outputs are one but for so many units in the last place, 0 for equal bits.

    Ids of a router may differ where their gates and logits do not.
    """
    if isinstance(own, tuple) != isinstance(ours, tuple):
        return False
    if not isinstance(own, tuple):
        own, ours = (own,), (ours,)
    if len(own) != len(ours) or not all(isinstance(part, Tensor) for part in own):
        return False
    for mine, theirs in zip(ours, own, strict=True):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return False
        if not mine.is_floating_point():
            if not torch.equal(own[0].gather(1, mine), own[0].gather(1, theirs)):
                return False
            continue
        off = (mine.float() - theirs.float()).abs()
        if not bool((off <= ulps * (1.01 * _ULP[mine.dtype] * theirs.float().abs() + 1e-6)).all()):  # nor is any NaN
            return False
        if mine.dtype in _HALVES and float((off > 0).float().mean()) > _MOST_OFF:
            return False
    return True


def _has_more(module: nn.Module, name: str) -> bool:
    """Whether a module holds anything beside one parameter."""
    held = (*module._parameters, *module._buffers, *module._modules)
    return any(other != name and getattr(module, other) is not None for other in held)


def _rows(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _random(like: Tensor, *shape: int) -> Tensor:
    """The same on every peer, and unlike anything that rounds to round numbers."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*shape, generator=generator).to(like.device, like.dtype)
