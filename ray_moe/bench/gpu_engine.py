"""The engine end to end on GPUs: throughput, decode steps and where a step's time goes, for Qwen3-30B-A3B's shape.

    python -m ray_moe.bench.gpu_engine [--ranks 1] [--requests 1000] [--out DIR]
                                       [--parts steps,profile,prefill,long,short]

A process for each GPU, data parallel with experts spread over all of them, random weights, random tokens, no Ray and no
tokenizer: what a peer of a cluster runs, and nothing around it. Requests are of one rank; figures are the slowest
rank's, tokens per second those of one GPU. A decode step is the median of the loop's own steps with a full batch.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ray_moe.bench.gpu_layer import environment
from ray_moe.bench.gpu_peer import EngineSizes, GpuPeer
from ray_moe.bench.gpu_ranks import Seat, ranks_here, run_ranks
from ray_moe.dataplane.layer import LayerCounters
from ray_moe.deadline import Deadline, pause
from ray_moe.engine.request import Request
from ray_moe.engine.sampling import SamplingParams

BATCHES = (1, 8, 32, 128, 256)
# name -> (tokens of a prompt, new tokens)
WORKLOADS = {"long": (1024, 128), "short": (128, 512)}
PARTS = ("steps", "profile", "prefill", *WORKLOADS)
_STEPS, _PROMPT = 100, 256
_PROFILED = (1, 32, 256)
_PREFILLED = (64, 1024)  # prompts and their tokens
# Steps of a profiled batch: after its prefill, timed while nobody watches, watched. Seconds between two looks.
_SETTLED, _TIMED, _WATCHED = 8, 40, 12
_LOOK_S = 0.01
# Decode attention has one such kernel in each layer.
_ONCE_A_LAYER = "_paged_decode_kernel"
_ACTIVITIES = [torch.profiler.ProfilerActivity.CUDA]
_DEADLINE_S = 400.0


def measure(seat: Seat, sizes: EngineSizes, requests: int, parts: Sequence[str]) -> dict[str, Any]:
    """One rank's figures."""
    with tempfile.TemporaryDirectory() as folder, GpuPeer(Path(folder), seat, sizes) as peer:
        found: dict[str, Any] = {
            "start_s": {name: round(seconds, 2) for name, seconds in peer.seconds.items()},
            "kv_blocks": peer.kv_blocks,
            "memory_gib": peer.memory_gib,
            "graphs": [graphs.captures for graphs in peer.loop._units._graphs.values()],
            "without_graphs": [graphs.failure for graphs in peer.loop._units._graphs.values()],
        }
        peer.serve(_requests(seat, "warm", 4, 512, 40), _DEADLINE_S)  # all ranks are there, everything is compiled
        if "steps" in parts:
            found["decode_step_ms"] = {batch: _decode_step(peer, seat, batch) for batch in BATCHES}
        if "profile" in parts:
            with torch.profiler.profile(activities=_ACTIVITIES):
                pause(_LOOK_S)  # the first watch takes a second to begin
            found["profile"] = {batch: _profile(peer, seat, batch) for batch in _PROFILED}
        if "prefill" in parts:
            found["prefill"] = _prefill(peer, seat, sizes.max_prefill_tokens)
        for name, (prompt, new) in WORKLOADS.items():
            if name in parts:
                seconds = peer.serve(_requests(seat, name, requests, prompt, new), _DEADLINE_S)
                found[name] = {
                    "prompt": prompt,
                    "new": new,
                    "requests": requests,
                    "seconds": seconds,
                    "total_tokens_per_s": requests * (prompt + new) / seconds,
                    "output_tokens_per_s": requests * new / seconds,
                    "preemptions": peer.loop.scheduler.preemptions,
                }
        total = LayerCounters.total(peer.counters.values())
        found["replays"], found["fallbacks"] = total.replays, dict(total.fallbacks)
        found["device_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def _requests(seat: Seat, name: str, count: int, prompt: int, new: int) -> list[Request]:
    generator = torch.Generator().manual_seed(seat.rank * 1000 + count)
    tokens = torch.randint(10, 150_000, (count, prompt), generator=generator).tolist()
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    return [Request(f"{name}-{seat.rank}-{number}", tuple(ids), params) for number, ids in enumerate(tokens)]


def _decode_step(peer: GpuPeer, seat: Seat, batch: int) -> dict[str, float]:
    """Milliseconds of the last steps of a batch that starts and ends together."""
    peer.serve(_requests(seat, f"step{batch}", batch, _PROMPT, _STEPS + 28), _DEADLINE_S)
    steps = sorted(peer.step_ms(_STEPS)[:-4])
    return {"p50": statistics.median(steps), "p90": steps[len(steps) * 9 // 10]}


def _profile(peer: GpuPeer, seat: Seat, batch: int) -> dict[str, Any]:
    """Milliseconds of a decode step by what the device does in it; `idle_ms`, the rest, is the host's.

    `step_ms` is the median of this batch's own steps before anything watches them. The device's share is of whole steps
    under the profiler, which lengthens the gaps between kernels (`watched_step_ms`) but hardly the kernels: a step
    without gaps can have an `idle_ms` a little below 0.
    """
    requests = _requests(seat, f"profile{batch}", batch, _PROMPT, 700)
    peer.outlet.expect(len(requests))
    peer.submit(requests)
    _until(peer, lambda: peer.loop.load.running == batch and not peer.loop.load.waiting)
    _run_steps(peer, _SETTLED + _TIMED)
    step_ms = statistics.median(peer.step_ms(_TIMED))
    with torch.profiler.profile(activities=_ACTIVITIES) as profiler:
        _run_steps(peer, _WATCHED)
    for request in requests:
        peer.loop.cancel(request.request_id)
    peer.until_ended(_DEADLINE_S)
    watched = whole_steps(_spans(profiler), peer.trunk.config.num_hidden_layers)
    if watched is None:
        return {"step_ms": step_ms, "error": "no whole step was watched"}
    return {"step_ms": step_ms, "idle_ms": step_ms - watched["busy_ms"]} | watched


def _prefill(peer: GpuPeer, seat: Seat, unit: int) -> dict[str, Any]:
    """Prompts that are answered with one token: tokens per second while nobody watches, then milliseconds of a full
    unit by what the device does in it. `idle_ms` is the host's, and that of the watch."""
    count, prompt = _PREFILLED
    seconds = peer.serve(_requests(seat, "prefill", count, prompt, 1), _DEADLINE_S)
    with torch.profiler.profile(activities=_ACTIVITIES) as profiler:
        peer.serve(_requests(seat, "watched", count, prompt, 1), _DEADLINE_S)
        torch.cuda.synchronize()
    spans = sorted(_spans(profiler), key=lambda span: span.start)
    units = count * prompt / unit
    found: dict[str, Any] = {"tokens_per_s": count * prompt / seconds, "unit": unit, "unit_ms": 1e3 * seconds / units}
    if not any(_kind_of(span.name) == "experts" for span in spans):  # the profiler loses all kernels now and then
        return found | {"error": "no kernel was watched"}
    length = max(span.end for span in spans) - spans[0].start
    sums = sums_of(spans, spans[0].start, units)
    return found | {"watched_unit_ms": length * 1e-3 / units, "idle_ms": length * 1e-3 / units - sums["busy_ms"]} | sums


def _run_steps(peer: GpuPeer, steps: int) -> None:
    counters = peer.loop.counters
    last = counters.steps_worked + steps
    _until(peer, lambda: counters.steps_worked >= last)


def _until(peer: GpuPeer, reached: Callable[[], bool]) -> None:
    """Raises `DeadlineError`, what ended the loop, and `RuntimeError` where the requests end first."""
    deadline = Deadline(_DEADLINE_S)
    while not reached():
        if peer.outlet.done.is_set():
            peer.until_ended(0.0)
            raise RuntimeError("the profiled requests ended before they were watched")
        deadline.check("the benchmark's profiled steps")
        pause(_LOOK_S)


@dataclass(frozen=True)
class Span:
    """One kernel or copy on the device, in microseconds of one clock."""

    name: str
    start: float
    end: float


def _spans(profiler: torch.profiler.profile) -> list[Span]:
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def whole_steps(spans: Sequence[Span], layers: int) -> dict[str, Any] | None:
    """What the device does in a decode step of `layers` layers: the mean of the whole steps among `spans`.

    n steps lie between one layer's decode attention and that of the same layer n steps on, wherever in a step the watch
    began. `busy_ms` counts what runs at once only once, `device_ms` and `slowest` each. None without a whole step.
    """
    marks = sorted(span.start for span in spans if span.name == _ONCE_A_LAYER)
    steps = (len(marks) - 1) // layers
    if steps < 1:
        return None
    first, last = marks[0], marks[steps * layers]
    inside = sorted((span for span in spans if first <= span.start < last), key=lambda span: span.start)
    watched = {"watched_step_ms": (last - first) * 1e-3 / steps, "watched_steps": steps}
    return watched | {"launches_per_step": len(inside) / steps} | sums_of(inside, first, steps)


def sums_of(inside: Sequence[Span], first: float, steps: float) -> dict[str, Any]:
    """Milliseconds of one of so many steps, whose spans from `first` on come in the order of their starts."""
    kinds: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, float] = defaultdict(float)
    busy, until = 0.0, first
    for span in inside:
        kinds[_kind_of(span.name)] += span.end - span.start
        names[span.name[:80]] += span.end - span.start
        busy += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    each, longest = 1e-3 / steps, sorted(names.items(), key=lambda item: -item[1])[:12]
    return {
        "busy_ms": busy * each,
        "device_ms": {name: round(spent * each, 4) for name, spent in sorted(kinds.items())},
        "slowest": {name: round(spent * each, 4) for name, spent in longest},
    }


def _kernels_of(*modules: ModuleType) -> frozenset[str]:
    return frozenset(name for module in modules for name in vars(module) if name.endswith("_kernel"))


def _our_kernels() -> dict[str, frozenset[str]]:
    from ray_moe.kernels import attention, combine, decode_layer, gemv_layer, grouped_gemm, routing, warp_gemm, window

    return {
        "experts": _kernels_of(combine, decode_layer, gemv_layer, grouped_gemm, routing, warp_gemm),
        "exchange": _kernels_of(window),
        "attention": _kernels_of(attention),
    }


_KERNELS = ("experts", "exchange", "attention")
_LIBRARIES = {"exchange": r"nccl", "attention": r"flash", "products": r"gemm|gemv|nvjet|cutlass|xmma|splitKreduce"}


@cache
def _kind_of(name: str) -> str:
    """What a kernel is for, by its name."""
    for kind, names in _our_kernels().items():
        if name in names:
            return kind
    return next((kind for kind, known in _LIBRARIES.items() if re.search(known, name, re.IGNORECASE)), "rest")


def summary(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The slowest rank's figures; rank 0's profile."""
    first = ranks[0]
    found: dict[str, Any] = {name: first[name] for name in first if name not in (*WORKLOADS, "decode_step_ms")}
    for name in WORKLOADS:
        if name in first:
            found[name] = max((rank[name] for rank in ranks), key=lambda row: row["seconds"])
    if "decode_step_ms" in first:
        found["decode_step_ms"] = {
            batch: {at: max(rank["decode_step_ms"][batch][at] for rank in ranks) for at in ("p50", "p90")}
            for batch in first["decode_step_ms"]
        }
    return {"ranks": len(ranks)} | found


def _show(row: Mapping[str, Any]) -> None:
    print(f"ranks {row['ranks']}: start {row['start_s']}, GiB {row['memory_gib']}, {row['kv_blocks']} KV blocks, "
          f"graphs {row['graphs']}, replays {row['replays']}, fallbacks {row['fallbacks']}, "
          f"{row['without_graphs']}")  # fmt: skip
    for batch, step in row.get("decode_step_ms", {}).items():
        print(f"  decode, batch {batch}: {step['p50']:.2f} ms (p90 {step['p90']:.2f})")
    for batch, profile in row.get("profile", {}).items():
        print(f"  profile, batch {batch}: {json.dumps(profile)}")
    if "prefill" in row:
        print(f"  prefill: {json.dumps(row['prefill'])}")
    for name in WORKLOADS:
        if name in row:
            run = row[name]
            print(f"  {run['prompt']} in, {run['new']} out, {run['requests']} requests: {run['seconds']:.1f} s, "
                  f"{run['total_tokens_per_s']:.0f} tokens/s, {run['output_tokens_per_s']:.0f} out")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ray_moe.bench.gpu_engine")
    parser.add_argument("--ranks", help="numbers of GPUs, one run each (default: 1, all)")
    parser.add_argument("--requests", type=int, default=1000, help="of each rank and workload")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--layers", type=int, default=EngineSizes.layers)
    parser.add_argument("--eager", action="store_true", help="decode without graphs")
    parser.add_argument("--out", type=Path, help="folder for the record (default: it is printed)")
    options = parser.parse_args(arguments)
    sizes = EngineSizes(layers=options.layers, graphs=not options.eager)
    wanted = options.ranks or ",".join(map(str, sorted({1, ranks_here()})))
    rows = []
    for ranks in map(int, wanted.split(",")):
        if ranks > ranks_here():
            print(f"ranks {ranks}: not run, {ranks_here()} GPUs are here")
            continue
        found = run_ranks(measure, sizes, options.requests, options.parts.split(","), seconds=_DEADLINE_S, ranks=ranks)
        rows.append(summary(found))
        _show(rows[-1])
    record = environment() | {
        "command": f"python -m ray_moe.bench.gpu_engine --ranks {wanted} --requests {options.requests}",
        "model": "Qwen3-30B-A3B's shape, bf16, random weights"
        + (f", {sizes.layers} layers" if sizes.layers != 48 else ""),
        "limits": vars(sizes),
        "rows": rows,
    }
    if options.out is not None:
        (options.out / "engine.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
