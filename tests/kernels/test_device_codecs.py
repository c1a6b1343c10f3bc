"""FP8 payloads by kernels: the wire rows of the payload codec, byte for byte, and refused where it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ray_moe.dataplane.device_codecs import LaunchedFp8, codec_on
from ray_moe.dataplane.precision import FP8, Fp8Block, Fp8Row
from ray_moe.errors import ConfigError, HandleError

CPU = torch.device("cpu")


def check(codec: Fp8Block, rows_ND: Tensor, device: torch.device) -> None:
    launched, wanted = LaunchedFp8(codec), codec.encode(rows_ND)
    wire_NW = launched.encode(rows_ND.to(device))
    assert torch.equal(wire_NW.cpu(), wanted)
    assert torch.equal(launched.decode(wire_NW, rows_ND.dtype).cpu(), codec.decode(wanted, rows_ND.dtype))
    assert (launched.name, launched.row_bytes, launched.wire_dtype) == (codec.name, codec.row_bytes, codec.wire_dtype)


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("codec", [Fp8Block(256), Fp8Block(132), Fp8Row(72)], ids=["blocks", "ragged", "row"])
def test_wire_rows_are_the_payload_codecs_byte_for_byte(codec: Fp8Block, rows: int, device: torch.device) -> None:
    # Numbers that need no rounding: the interpreter's casts to FP8 lose a carry.
    patterns_ND = torch.randint(0, 127, (rows, codec.width), dtype=torch.uint8)
    patterns_ND[:, :: min(codec.block, 64)] = 126
    check(codec, patterns_ND.view(FP8).float() * 2.0 ** torch.randint(-9, 9, (rows, 1)), device)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 4096])
@pytest.mark.parametrize("codec", [Fp8Block(7168), Fp8Block(2052), Fp8Row(2048)], ids=["blocks", "ragged", "row"])
def test_wire_rows_on_the_gpu_are_those_of_the_cpu(codec: Fp8Block, rows: int) -> None:
    device = torch.device("cuda")
    assert isinstance(codec_on(codec.name, codec.width, torch.bfloat16, device), LaunchedFp8)
    rows_ND = torch.randn(rows, codec.width) * 2.0 ** torch.randint(-9, 9, (rows, 1))
    rows_ND[: rows // 2, : codec.width // 2] = 0
    check(codec, rows_ND.bfloat16(), device)


def test_other_rows_are_refused_by_name(device: torch.device) -> None:
    codec = LaunchedFp8(Fp8Block(64))
    with pytest.raises(HandleError, match=r"codec fp8_block takes rows \[N, 64\], found \[2, 63\]"):
        codec.encode(torch.zeros(2, 63, device=device))
    with pytest.raises(HandleError, match=r"takes rows \[N, 68\] in torch.uint8, found \[2, 68\] in torch.int8"):
        codec.decode(torch.zeros(2, 68, dtype=torch.int8, device=device), torch.float32)


def test_where_a_launch_cannot_write_the_codec_is_torchs() -> None:
    assert type(codec_on("fp8_block", 256, torch.bfloat16, CPU)) is Fp8Block
    assert type(codec_on("fp8_block", 130, torch.bfloat16, torch.device("cuda"))) is Fp8Block
    assert codec_on("native", 256, torch.bfloat16, torch.device("cuda")).name == "native"
    with pytest.raises(ConfigError, match="codec must be one of"):
        codec_on("fp4", 256, torch.bfloat16, CPU)
