"""What a budget counts before anything is taken, beside what a GPU then holds."""

from __future__ import annotations

import pytest
import torch

from ray_moe.identity import GlobalRank

pytestmark = pytest.mark.gpu

_SMALL = 2**16  # the allocator rounds each tensor up to 512 bytes
_SEGMENT = 2**21  # small tensors come in segments of their own


def test_a_workspace_takes_no_more_than_was_added_up() -> None:
    from ray_moe.kernels.fused_layer import Workspace
    from ray_moe.kernels.regions import workspace_nbytes
    from ray_moe.kernels.tiling import LayerShape

    shape, tokens = LayerShape(128, 8, 2048, 768), 4096
    sizes = (shape.num_experts, shape.top_k, shape.hidden, shape.ffn, tokens, 2)
    before = torch.cuda.memory_allocated()
    workspace = Workspace(shape, tokens, torch.bfloat16, torch.device("cuda"))
    without_results = torch.cuda.memory_allocated() - before
    assert 0.8 * workspace_nbytes(*sizes, results=False) < without_results
    assert without_results <= workspace_nbytes(*sizes, results=False) + _SMALL
    assert workspace.rows_RD.shape == (tokens * shape.top_k, shape.hidden)
    assert torch.cuda.memory_allocated() - before <= workspace_nbytes(*sizes) + _SMALL


def test_results_that_go_home_take_no_workspace() -> None:
    from ray_moe.kernels.activation import SwiGLU
    from ray_moe.kernels.fused_layer import FusedLayer, Slabs, Workspace
    from ray_moe.kernels.tiling import LayerShape

    device, shape, tokens = torch.device("cuda"), LayerShape(8, 2, 2048, 256), 1024
    slabs = Slabs(
        torch.randn(8, 512, 2048, device=device).bfloat16(), torch.randn(8, 2048, 256, device=device).bfloat16(),
        None, None, SwiGLU(),
    )  # fmt: skip
    layer = FusedLayer(slabs, Workspace(shape, tokens, torch.bfloat16, device))
    hidden = torch.randn(tokens, 2048, device=device).bfloat16()
    ids = torch.randint(0, 8, (tokens, 2), device=device)
    slots = torch.arange(8, dtype=torch.int32, device=device)
    home = torch.zeros(tokens * 2, 2048, dtype=torch.bfloat16, device=device)
    before = torch.cuda.memory_allocated()
    layer.experts(hidden, ids, slots, home=(torch.tensor([home.data_ptr()], device=device), tokens * 2, 0))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < home.nbytes // 2, "no rows of its own"
    rows, position = layer.experts(hidden, ids, slots)
    assert torch.equal(home, rows[position.long()]), "each result at its route's place"


def test_a_window_takes_no_more_than_was_added_up() -> None:
    from ray_moe.comm.window import NodeWindow
    from ray_moe.kernels.regions import Regions

    device = torch.device("cuda", torch.cuda.current_device())
    regions = Regions.plan(2, 4096, 8, 2048, torch.bfloat16, quantized=True)
    torch.cuda.Stream(device)  # a process's first one makes the whole pool of them
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    window = NodeWindow(regions, GlobalRank(0), device, 1.0)
    taken = before - torch.cuda.mem_get_info()[0]
    assert regions.nbytes <= taken <= regions.device_nbytes + 2 * _SEGMENT, (regions.nbytes, taken)
    window.close()
