"""Linear layers of one module that multiply the same rows, as one product: query, key and value; gate and up.

A decode step is bound by launches of a few rows, and each of these products is one. Their weights lie one behind the
other in one matrix, of which every layer's own weight is a view: nothing is held twice. The layer that is called first
multiplies for all; the others find theirs where the same rows are asked for. A layer that is given other rows
multiplies by itself, and its module's products are apart from then on.

What a layer is called only says what to try. A product of more columns may sum in another order, or in parts that are
rounded: results must be as near to the product in fp32 as the layers' own are. Letters: R rows, D inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Of one module's children.
_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)
_PROBE_ROWS = 24
_HALVES = (torch.bfloat16, torch.float16)
# How much further from the product in fp32 results may be than the layers' own: in the mean of squares, and at most.
_MEAN, _MOST = 1.1, 2.0


def join_products(module: nn.Module) -> bool:
    """Give siblings among a module's children one product; whether it has some, in half precision and alike.

    Their parameters stay what and where they are, as views of a matrix.
    """
    for names in _SIBLINGS:
        layers = [getattr(module, name, None) for name in names]
        if all(type(layer) is nn.Linear and "forward" not in vars(layer) for layer in layers):
            return _join([layer for layer in layers if isinstance(layer, nn.Linear)])
    return False


def _join(layers: Sequence[nn.Linear]) -> bool:
    first, biases = layers[0], [layer.bias for layer in layers]
    like = (first.weight.dtype, first.weight.device, first.in_features)
    if first.weight.dtype not in _HALVES or any(
        (layer.weight.dtype, layer.weight.device, layer.in_features) != like for layer in layers
    ):
        return False
    if any(bias is None for bias in biases) and any(bias is not None for bias in biases):
        return False
    generator = torch.Generator().manual_seed(7)
    rows_RD = torch.randn(_PROBE_ROWS, first.in_features, generator=generator).to(first.weight.device, like[0])
    weight_ND = torch.cat([layer.weight.data for layer in layers])
    bias_N = None if first.bias is None else torch.cat([bias.data for bias in biases])
    joined = Joined(layers, weight_ND, bias_N)
    exact_RN = F.linear(rows_RD.float(), weight_ND.float(), None if bias_N is None else bias_N.float())
    own_RN = torch.cat([layer(rows_RD) for layer in layers], dim=-1)
    ours_RN = torch.cat([joined.product(index, rows_RD) for index in range(len(layers))], dim=-1)
    if not _is_as_near(ours_RN.float() - exact_RN, own_RN.float() - exact_RN):
        return False
    for index, (layer, (start, end)) in enumerate(zip(layers, joined.bounds, strict=True)):
        layer.weight.data = weight_ND[start:end]
        if bias_N is not None:
            layer.bias.data = bias_N[start:end]
        layer.forward = partial(joined.product, index)  # type: ignore[method-assign]
    return True


class Joined:
    """Siblings as one product. On the thread that forwards the trunk; between two forwards it holds no rows."""

    def __init__(self, layers: Sequence[nn.Linear], weight_ND: Tensor, bias_N: Tensor | None) -> None:
        self._layers, self._weight_ND, self._bias_N = layers, weight_ND, bias_N
        ends = torch.tensor([layer.out_features for layer in layers]).cumsum(0).tolist()
        self.bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        self.together = True
        self._rows: Tensor | None = None
        self._first = 0
        self._left: dict[int, Tensor] = {}

    def product(self, index: int, input: Tensor) -> Tensor:
        """What layer `index` gives of its rows [..., D]: its columns of the product, at that product's stride."""
        if self._rows is input and index in self._left:
            mine = self._left.pop(index)
            if not self._left:
                self._rows = None
            return mine
        if self._left and index != self._first:  # the first has rows that this one does not
            self.together = False
        if not self.together:
            self._rows, self._left = None, {}
            layer = self._layers[index]
            return F.linear(input, layer.weight, layer.bias)
        out = F.linear(input, self._weight_ND, self._bias_N)
        pieces = {number: out[..., start:end] for number, (start, end) in enumerate(self.bounds)}
        mine = pieces.pop(index)
        self._rows, self._first, self._left = input, index, pieces
        return mine


def _is_as_near(ours_RN: Tensor, own_RN: Tensor) -> bool:
    """Whether errors are those of the layers' own products, or hardly larger; not where any is NaN."""
    mean = ours_RN.square().mean() <= _MEAN**2 * own_RN.square().mean()
    most = ours_RN.abs().max() <= _MOST * own_RN.abs().max()
    return bool(mean & most)
