"""What a payload format costs in bytes and moves in numbers, on the embedded model's own rows.

The routed experts of tiny-moe get their rows as dispatch would deliver them, encoded and decoded; everything else stays
as it is. That measures an error. It says nothing about quality: the model is small, and nobody has evaluated it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ray_moe.bench.report import Row
from ray_moe.dataplane.precision import PayloadCodec, codec_named, error_report, smaller_format
from ray_moe.evidence import RowSlots
from ray_moe.models import tiny_moe_path
from ray_moe.text import load_tokenizer
from ray_moe.weights.sources import experts_modules

FORMATS = ("native", "fp8_row", "fp8_block")
# Lines that the model may have seen: an error of rows does not depend on it.
TEXT = """HAMLET. To be, or not to be, that is the question:
Whether 'tis nobler in the mind to suffer
The slings and arrows of outrageous fortune,
Or to take arms against a sea of troubles,
And by opposing end them. To die: to sleep;
No more; and by a sleep to say we end
The heart-ache and the thousand natural shocks
That flesh is heir to, 'tis a consummation
Devoutly to be wish'd."""


@torch.inference_mode()
def run() -> list[Row]:
    """One row per format: bytes of a row on the wire, error of the rows, error and changed choices of the logits."""
    torch.set_num_threads(1)
    folder = tiny_moe_path()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    ids = torch.tensor([load_tokenizer(folder).encode(TEXT)])
    seen: list[Tensor] = []

    def keep(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows

    with _rows_into_experts(model, keep):
        exact = model(ids).logits[0]
    rows_ND = torch.cat(seen)
    width = rows_ND.shape[1]
    measured: list[Row] = []
    for name in FORMATS:
        codec = codec_named(name, width, torch.float32)
        with _rows_into_experts(model, partial(_through, codec)):
            logits = model(ids).logits[0]
        report = error_report(rows_ND, codec)
        measured.append(
            {
                "payload": name,
                "row_bytes": codec.row_bytes,
                "least_of_bf16_and_fp8": smaller_format(RowSlots(1), width),
                "rows": int(report.rows),
                "rows_max_abs_error": report.max_abs,
                "rows_relative_rms_error": report.relative_rms,
                "logits_relative_rms_error": float((logits - exact).norm() / exact.norm()),
                "positions": len(exact),
                "positions_with_another_greedy_token": int((logits.argmax(-1) != exact.argmax(-1)).sum()),
            }
        )
    return measured


def _through(codec: PayloadCodec, rows: Tensor) -> Tensor:
    return codec.decode(codec.encode(rows), rows.dtype)


@contextmanager
def _rows_into_experts(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """`change` sees, and may replace, the rows that every routed-experts module is given."""

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(args[0]), *args[1:])

    hooks = [module.register_forward_pre_hook(before) for _, _, module in experts_modules(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
