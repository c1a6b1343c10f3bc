"""Experts as a service on a cluster of two peers: layers called by themselves, by many callers, beside requests.

The oracle is the experts module of the same checkpoint as transformers runs it.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest
import ray
import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import ray_moe
from ray_moe import cluster as clusters
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.engine.sampling import SamplingParams
from ray_moe.errors import (
    ConfigError,
    HandleError,
    IllegalTransitionError,
    LeaseExpiredError,
    NotServingError,
    PeerLostError,
    RequestError,
)
from ray_moe.http_client import AsyncMoEClient, BadRequestError, MoEClient, NotFoundError
from ray_moe.models import tiny_moe_path
from ray_moe.sdk import Client, ClusterClient, connect
from ray_moe.serve import app
from ray_moe.weights.sources import experts_modules

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAME, LEASE_S = "service", 6.0
FP32 = {"rtol": 1e-4, "atol": 1e-5}  # two orders of fp32 sums


@pytest.fixture(scope="module")
def cluster(local_ray: None) -> Iterator[Cluster]:
    config = ClusterConfig(
        name=NAME,
        model=str(tiny_moe_path()),
        peers=2,
        spare_slots=4,
        kv_blocks=256,
        max_prefill_tokens=64,
        call_lease_s=LEASE_S,
        audit_rate=1.0,
    )
    running = clusters.start(config)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[ClusterClient]:
    with connect(cluster=NAME) as connected:
        yield connected


@cache
def modules() -> dict[int, nn.Module]:
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_path(), dtype=torch.float32)
    return {layer: module for layer, _, module in experts_modules(model)}


def own(layer: int, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        return modules()[layer](*given)


@cache
def shape() -> tuple[int, int, int]:
    """Hidden size, experts and top-k."""
    config = AutoModelForCausalLM.from_pretrained(tiny_moe_path()).config
    return config.hidden_size, config.num_experts, config.num_experts_per_tok


def rows(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    hidden, experts, top_k = shape()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k].contiguous()
    gates = torch.rand(tokens, top_k, generator=generator)
    return torch.randn(tokens, hidden, generator=generator), ids, gates


def references(cluster: Cluster) -> int:
    return sum(row.references for row in cluster.status().generations)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.05)


def test_every_layer_is_the_modules_own_forward_for_random_routes(client: ClusterClient) -> None:
    for layer in client.moe_layers:
        for tokens in (1, 5, 64, 150):  # the last is cut into three calls
            given = rows(tokens, seed=31 * layer + tokens)
            torch.testing.assert_close(client.experts(layer).forward(*given), own(layer, given), **FP32)


def test_zero_tokens_give_zero_rows(client: ClusterClient) -> None:
    given = rows(0)
    assert client.experts(0).forward(*given).shape == given[0].shape


def test_many_callers_are_batched_into_few_steps_beside_requests_and_none_gets_anothers_rows(
    cluster: Cluster, client: ClusterClient
) -> None:
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    alone = client.generate(tuple(range(40, 60)), params).token_ids
    before = cluster.status().peers

    async def caller(own_client: Client, number: int) -> None:
        for turn in range(4):
            given = rows(1 + number % 5, seed=100 * number + turn)
            out = await own_client.experts(1).forward(*given)
            torch.testing.assert_close(out, own(1, given), **FP32)

    async def all_of_them() -> tuple[int, ...]:
        directory = cluster.directory()
        callers = [Client(directory) for _ in range(16)]
        generation = asyncio.create_task(callers[0].generate(tuple(range(40, 60)), params))
        await asyncio.gather(*(caller(one, number) for number, one in enumerate(callers)))
        return (await generation).token_ids

    assert asyncio.run(all_of_them()) == alone, "requests are served beside the calls, and no token changes"
    after = cluster.status().peers
    calls = sum(new.bare_calls - old.bare_calls for old, new in zip(before, after, strict=True))
    steps = max(new.steps_worked - old.steps_worked for old, new in zip(before, after, strict=True))
    assert calls == 64
    assert steps - 64 < calls, f"{calls} calls took {steps} steps, of which up to 65 were the request's"
    until(lambda: references(cluster) == 2)


def test_a_placement_that_changes_under_the_calls_changes_no_result(cluster: Cluster, client: ClusterClient) -> None:
    async def calls() -> int:
        own_client, done = Client(cluster.directory()), 0
        publishing = asyncio.create_task(asyncio.to_thread(cluster.publish, {(1, 3): 2, (2, 0): 2}))
        while not publishing.done() or done < 20:
            given = rows(7, seed=done)
            layer = (1, 2)[done % 2]
            torch.testing.assert_close(await own_client.experts(layer).forward(*given), own(layer, given), **FP32)
            done += 1
        await publishing
        return done

    before = cluster.status().generation
    assert asyncio.run(calls()) >= 20
    assert cluster.status().generation > before
    until(lambda: [row.state for row in cluster.status().generations][-2:] == ["RETIRED", "ACTIVE"])


def test_a_call_is_combined_exactly_once(cluster: Cluster, client: ClusterClient) -> None:
    given = rows(6, seed=5)
    call = client.experts(2).dispatch(*given)
    torch.testing.assert_close(call.combine(), own(2, given), **FP32)
    with pytest.raises(IllegalTransitionError, match="'submit_combine' is illegal in state DISPATCH_STATE_RELEASABLE"):
        call.combine()
    until(lambda: references(cluster) == 2)


def test_of_two_that_combine_at_once_one_is_refused(cluster: Cluster) -> None:
    given = rows(6, seed=6)

    async def both() -> list[Tensor | BaseException]:
        call = await Client(cluster.directory()).experts(2).dispatch(*given)
        return await asyncio.gather(call.combine(), call.combine(), return_exceptions=True)

    outcomes = asyncio.run(both())
    (result,) = (one for one in outcomes if isinstance(one, Tensor))
    torch.testing.assert_close(result, own(2, given), **FP32)
    assert sum(isinstance(one, IllegalTransitionError) for one in outcomes) == 1


def test_a_call_that_is_given_up_is_not_there_any_more(cluster: Cluster, client: ClusterClient) -> None:
    call = client.experts(0).dispatch(*rows(3))
    call.abandon()
    with pytest.raises(HandleError):
        call.combine()
    until(lambda: references(cluster) == 2)


@ray.remote(num_cpus=0)
class Caller:
    """A caller in a process of its own, to be killed."""

    async def dispatch(self, given: tuple[Tensor, Tensor, Tensor]) -> int:
        self.client = Client(clusters.connect(NAME).directory())
        self.call = await self.client.experts(1).dispatch(*given)
        return os.getpid()


def test_whoever_never_combines_or_dies_loses_the_output_and_the_lease_and_nobody_else_notices(
    cluster: Cluster, client: ClusterClient
) -> None:
    caller = Caller.remote()
    dying = ray.get(caller.dispatch.remote(rows(9)), timeout=60)
    forgotten = client.experts(0).dispatch(*rows(3))
    _, ids, gates = rows(3)
    routing = ray.get_actor(f"{NAME}.routing", namespace="ray_moe")
    unused = ray.get(routing.bind.remote("nobody", 0, 0, ids, gates), timeout=20)
    held = cluster.status().generations[-1].holders
    assert sum(holder.startswith("call-") for holder in held) == 3
    assert unused.header.holder == "call-nobody" in held
    os.kill(dying, signal.SIGKILL)
    given = rows(9, seed=3)
    torch.testing.assert_close(client.experts(1).forward(*given), own(1, given), **FP32)
    until(lambda: references(cluster) == 2, LEASE_S + 20)
    with pytest.raises(LeaseExpiredError, match=r"was not combined within the 6 s of its lease"):
        forgotten.combine()


def test_what_no_router_gives_is_refused_by_name_before_anything_is_sent(
    cluster: Cluster, client: ClusterClient
) -> None:
    hidden, ids, gates = rows(4)
    size, experts, _ = shape()
    layer = client.experts(0)
    cases = {
        "hidden": [(hidden.double(), ids, gates), (hidden[:, 1:], ids, gates), (hidden[None], ids, gates)],
        "topk_ids": [
            (hidden, ids[:3], gates),
            (hidden, ids.float(), gates),
            (hidden, ids[:, :1], gates),
            (hidden, ids + experts, gates),
            (hidden, ids - experts, gates),
        ],
        "topk_weights": [(hidden, ids, gates.bfloat16()), (hidden, ids, gates[:, :1])],
    }
    granted = references(cluster)
    for param, given in cases.items():
        for one in given:
            with pytest.raises(RequestError) as refused:
                layer.forward(*one)
            assert refused.value.param == param, str(refused.value)
    with pytest.raises(RequestError, match=rf"hidden must be \[T, {size}\] in float32, found \[4, {size}\] in float64"):
        layer.forward(hidden.double(), ids, gates)
    with pytest.raises(ConfigError, match=r"layer must be one with routed experts, of .*, found 99"):
        client.experts(99)
    assert references(cluster) == granted


def test_the_peer_and_the_routing_actor_check_for_themselves(cluster: Cluster) -> None:
    routing = ray.get_actor(f"{NAME}.routing", namespace="ray_moe")
    peer = ray.get_actor(f"{NAME}.expert-0", namespace="ray_moe")
    hidden, ids, gates = rows(4)

    def bind(rank: int = 0, layer: int = 0, ids: Tensor = ids):  # type: ignore[no-untyped-def]
        return ray.get(routing.bind.remote("direct", rank, layer, ids, gates), timeout=20)

    from ray_moe.actors.calls import Rows

    with pytest.raises(Exception, match=r"must be in \[0, \d+\), found"):
        bind(ids=ids + 99)
    with pytest.raises(Exception, match="found 7"):
        bind(layer=7)
    with pytest.raises(Exception, match="rank 5 is leaving"):
        bind(rank=5)
    with pytest.raises(Exception, match="hidden must be"):
        ray.get(peer.run_call.remote(bind(), Rows.of(hidden[:2])), timeout=20)
    with pytest.raises(Exception, match="sealed as"):  # bound for the other origin
        ray.get(peer.run_call.remote(bind(rank=1), Rows.of(hidden)), timeout=20)
    handle = bind()
    ray.get(peer.run_call.remote(handle, Rows.of(hidden)), timeout=20)
    with pytest.raises(Exception, match="'submit_combine' is illegal"):  # the same handle, a second time
        ray.get(peer.run_call.remote(handle, Rows.of(hidden)), timeout=20)
    until(lambda: references(cluster) == 2)


def test_text_and_tokens_come_without_asyncio(client: ClusterClient) -> None:
    prompt = "To be, or not to be"
    whole = client.generate(prompt, max_tokens=16, temperature=0.0)
    records = list(client.stream(prompt, max_tokens=16, temperature=0.0))
    assert tuple(token for record in records for token in record.token_ids) == whole.token_ids
    assert "".join(client.stream_text(prompt, max_tokens=16, temperature=0.0)) == client.decode(whole.token_ids)
    stream = client.stream(prompt, max_tokens=1000, temperature=0.0, ignore_eos=True)
    next(stream)
    stream.close()
    until(lambda: sum(peer.kv_blocks_used for peer in client.cluster.status().peers) == 0)


# ---- over HTTP


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app.run(NAME, host="127.0.0.1", port=port, seconds=120)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        app.shutdown()


def test_a_layer_over_http_is_the_same_layer(url: str) -> None:
    async def asked(given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        async with AsyncMoEClient(url) as http:
            return await http.experts(3).forward(*given)

    with MoEClient(url) as http:
        for tokens in (0, 1, 150):
            given = rows(tokens, seed=tokens)
            torch.testing.assert_close(http.experts(3).forward(*given), own(3, given), **FP32)
            torch.testing.assert_close(asyncio.run(asked(given)), own(3, given), **FP32)


def test_what_is_no_call_of_a_layer_is_refused_over_http_by_name(cluster: Cluster, url: str) -> None:
    given = dict(zip(("hidden", "topk_ids", "topk_weights"), rows(3), strict=True))

    class Harmful:
        def __reduce__(self) -> tuple:
            return (os._exit, (1,))

    def post(body: bytes, layer: object = 0, kind: str = "application/octet-stream") -> tuple[int, str, str | None]:
        where = f"{url}/v1/experts/{layer}/forward"
        answer = httpx.post(where, content=body, headers={"content-type": kind}, trust_env=False, timeout=30)
        error = answer.json()["error"]
        return answer.status_code, error["message"], error["param"]

    good = save(given)
    for body, why, param in (
        (pickle.dumps(Harmful()), "the request body is not safetensors", None),
        (b"", "the request body is not safetensors", None),
        (good[:-7], "the request body is not safetensors", None),
        (save({"hidden": given["hidden"]}), "it must hold ['hidden', 'topk_ids', 'topk_weights']", None),
        (save({**given, "hidden": given["hidden"].half()}), "in float32, found", "hidden"),
        (save({**given, "topk_ids": given["topk_ids"] + 99}), f"must be in [0, {shape()[1]}), found", "topk_ids"),
    ):
        status, message, refused = post(body)
        assert (status, refused) == (400, param), message
        assert why in message
    assert post(good, 77)[:2] == (400, "layer must be one with routed experts, of (0, 1, 2, 3), found 77")
    assert post(good, "first")[0] == post(good, -1)[0] == 400
    assert post(good, kind="application/json")[0] == 415
    with MoEClient(url) as http, pytest.raises(BadRequestError, match="in float32") as refused:
        http.experts(0).forward(given["hidden"].double(), given["topk_ids"], given["topk_weights"])
    assert (refused.value.status, refused.value.param) == (400, "hidden")
    assert isinstance(refused.value, ConfigError), "the same error as inside the cluster"
    until(lambda: references(cluster) == 2)


def test_the_client_gives_what_the_cluster_generates_whole_and_in_chunks(client: ClusterClient, url: str) -> None:
    prompt, greedy = "To be, or not to be", {"max_tokens": 24, "temperature": 0}
    expected = client.decode(client.generate(prompt, max_tokens=24, temperature=0.0).token_ids)
    messages = [{"role": "user", "content": "Who goes there?"}]
    with MoEClient(url) as http:
        assert http.ready()
        whole = http.complete(prompt, **greedy)
        assert whole.text == expected
        assert whole.usage["completion_tokens"] == len(client.tokenizer.encode(expected)) or whole.choices
        chunks = list(http.stream_complete(prompt, stream_options={"include_usage": True}, **greedy))
        assert "".join(chunk.text for chunk in chunks) == expected
        assert chunks[-1].usage == whole.usage
        said = http.chat(messages, **greedy)
        assert "".join(chunk.text for chunk in http.stream_chat(messages, **greedy)) == said.text

    async def asked() -> tuple[str, str]:
        async with AsyncMoEClient(url) as other:
            stream = await other.stream_complete(prompt, **greedy)
            return (await other.chat(messages, **greedy)).text, "".join([chunk.text async for chunk in stream])

    assert asyncio.run(asked()) == (said.text, expected)


def test_a_stream_that_is_closed_frees_its_blocks_and_errors_have_types(cluster: Cluster, url: str) -> None:
    with MoEClient(url) as http:
        with http.stream_complete("To be", max_tokens=1500, temperature=0, ignore_eos=True) as stream:
            next(stream)
        until(lambda: sum(peer.kv_blocks_used for peer in cluster.status().peers) == 0)
        with pytest.raises(NotFoundError, match="this server has"):
            http.complete("To be", model="another")
        with pytest.raises(BadRequestError) as refused:
            http.complete("To be", max_tokens=0, request_id="mine-1")
        assert (refused.value.param, refused.value.request_id) == ("max_tokens", "mine-1")


# ---- a transformers model with the cluster's experts


IDS = torch.tensor([[5 + 7 * place % 90 for place in range(70)]])


@cache
def local_logits() -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(tiny_moe_path(), dtype=torch.float32).eval()(IDS).logits


def test_a_transformers_model_has_the_clusters_experts_through_both_doors(client: ClusterClient, url: str) -> None:
    with MoEClient(url) as http:
        for service in (client, http):
            ray_moe.register(service)
            model = AutoModelForCausalLM.from_pretrained(
                tiny_moe_path(), dtype=torch.float32, experts_implementation="ray_moe"
            )
            for remote in (model.eval(), ray_moe.load_trunk(tiny_moe_path())):
                assert not any(list(module.parameters()) for _, _, module in experts_modules(remote))
                with torch.no_grad():
                    logits = remote(IDS).logits
                torch.testing.assert_close(logits, local_logits(), **FP32)
                assert torch.equal(logits.argmax(-1), local_logits().argmax(-1))
    ray_moe.unregister()


def test_the_tour_runs(url: str) -> None:
    environment = os.environ | {"TOUR_CLUSTER": NAME, "TOUR_URL": url}
    address = ray.get_runtime_context().gcs_address
    tour = Path(__file__).resolve().parents[2] / "examples" / "sdk_tour.py"
    run = subprocess.run(
        [sys.executable, str(tour)],
        env=environment | {"RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "a second combine: handle" in run.stdout
    assert "parameters here" in run.stdout


def test_a_registry_that_was_started_again_grants_and_calls_go_on(cluster: Cluster, client: ClusterClient) -> None:
    routing = ray.get_actor(f"{NAME}.routing", namespace="ray_moe")
    ray.kill(routing, no_restart=False)
    given = rows(5, seed=9)
    torch.testing.assert_close(client.experts(0).forward(*given), own(0, given), **FP32)


def test_a_cluster_that_is_gone_is_named(cluster: Cluster) -> None:
    with connect(cluster=NAME) as connected:
        layer = connected.experts(0)
        trunk = ray_moe.load_trunk(tiny_moe_path(), cluster=connected)
        layer.forward(*rows(2))
        trunk(IDS)
        cluster.stop()
        with pytest.raises((NotServingError, PeerLostError), match=NAME):
            layer.forward(*rows(2))
        with pytest.raises((NotServingError, PeerLostError), match=NAME):
            trunk(IDS)
    with pytest.raises(NotServingError, match="is closed"):
        layer.forward(*rows(2))
    with pytest.raises(NotServingError, match="no cluster named 'service' runs"):
        connect(cluster=NAME)
