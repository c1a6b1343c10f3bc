"""Count lines in frames of one size, for carriers that neither learn nor survive it when peers' sizes differ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ray_moe.errors import CountMismatchError

# Gloo ends the whole process when two peers' messages differ in size, NCCL waits for ever: nothing whose size a peer
# might see otherwise may be sent before sizes are agreed. 4 KiB hold up to 508 slots.
_FRAME = 512


def gather_in_frames(line: Tensor, gather: Callable[[Tensor], Tensor], rank: int, epoch: int) -> Tensor:
    """The lines [P, M] of all peers, by a `gather` of equally long ones: once, or twice where a frame is too short.

    `CountMismatchError` on every peer when their lines differ in length.
    """
    frame = line.new_zeros(_FRAME)
    frame[0] = line.numel()
    frame[1 : 1 + line.numel()] = line[: _FRAME - 1]
    frames_PM = gather(frame)
    require_equal_lengths(frames_PM[:, 0].tolist(), rank, epoch)
    lines_PM = frames_PM[:, 1 : 1 + line.numel()]
    if line.numel() < _FRAME:
        return lines_PM
    return torch.cat([lines_PM, gather(line[_FRAME - 1 :])], dim=1)


def require_equal_lengths(lengths: list[int], rank: int, epoch: int) -> None:
    """`CountMismatchError` naming all lengths, in peer-slot order."""
    if min(lengths) != max(lengths):
        raise CountMismatchError(
            f"epoch {epoch}: the peers' count lines differ in length: {lengths} in peer-slot order, "
            f"seen by rank {rank}; they run different placements"
        )
