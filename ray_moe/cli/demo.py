"""demo: everything once, on this machine, in about a minute: a cluster, its HTTP API, its status, a proof; changes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_moe.cli.connection import attached, locate, serve_app
from ray_moe.cli.demo_elastic import second_act
from ray_moe.cli.generate import embedded, one_generation, ranks_document
from ray_moe.cli.head import free_ports
from ray_moe.cli.lifecycle import status_document
from ray_moe.cli.options import Address, AsJson, cluster_config
from ray_moe.cli.output import output
from ray_moe.errors import NotServingError
from ray_moe.models import TINY_MOE, tiny_moe_path

if TYPE_CHECKING:
    import httpx
    from transformers import PreTrainedModel

    from ray_moe.actors.reports import Directory

_MESSAGES = [{"role": "user", "content": "What newes from Rome, my Lord?"}]
_MAX_TOKENS, _TEMPERATURE, _SEED = 64, 0.7, 0
# Copies that routes are spread over: one expert in every layer, one in the first only.
_REPLICAS = "*:3=2,0:7=3"
_SPARE_SLOTS = 3
_HTTP_S = 120.0


def demo(
    peers: Annotated[int, typer.Option("--peers", metavar="N", help="Expert actors.")] = 4,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Serve the embedded model on this machine, chat with it over HTTP, and check its tokens against transformers;
    then change the cluster while a stream runs."""
    began = time.monotonic()
    replicas = _REPLICAS if peers >= 3 else ""
    config = cluster_config(
        None,
        [f"max_peers={peers + 1}"],
        model=TINY_MOE,
        name="demo",
        peers=peers,
        replicas=replicas,
        spare_slots=_SPARE_SLOTS,
    )
    model, port = tiny_moe_path(), free_ports(1)[0]
    with output(as_json) as out:
        with embedded(config, out, attached(locate(address, config.name)) if address else None) as cluster:
            from ray_moe.engine.sampling import SamplingParams
            from ray_moe.observe.status import render_status
            from ray_moe.text import load_tokenizer, render_chat

            out.say("starting the HTTP API")
            app = serve_app()
            app.run(config.name, host="127.0.0.1", port=port, seconds=config.start_deadline_s)
            try:
                url = f"http://127.0.0.1:{port}"
                out.say(f"POST {url}/v1/chat/completions {json.dumps(_MESSAGES)}")
                asked = time.monotonic()
                text = ""
                for piece in _chat(url):
                    text += piece
                    out.text(piece)
                seconds_chatting = time.monotonic() - asked
                out.text("\n")

                # The same seed gives the same tokens again, here as ids: HTTP speaks text only. Then greedily, on every
                # peer at once, for the comparison with transformers.
                tokenizer = load_tokenizer(model)
                prompt_ids = render_chat(tokenizer, _MESSAGES)
                directory = cluster.directory()
                sampled = SamplingParams(max_tokens=_MAX_TOKENS, temperature=_TEMPERATURE, seed=_SEED)
                made = asyncio.run(one_generation(directory, prompt_ids, sampled, tokenizer, lambda piece: None))
                greedy = asyncio.run(_on_every_peer(directory, prompt_ids))
                found = cluster.status()
                out.show(render_status(status_document(found)))
            finally:
                app.shutdown(config.name)
            elastic = second_act(cluster, out, prompt_ids, lambda count: endless_reference(model, prompt_ids, count))
        out.say("the same prompt with transformers alone (fp32, eager experts)")
        expected = reference_tokens(model, prompt_ids, _MAX_TOKENS)
        parity = all(tokens == expected for tokens in greedy) and made.text == text and elastic["token_exact"]
        tokens_per_s = len(made.token_ids) / seconds_chatting
        out.show(
            f"{len(made.token_ids)} tokens over HTTP, {tokens_per_s:.1f} tokens/s; "
            + (
                f"greedily, all {len(expected)} tokens of each peer equal transformers'"
                if parity
                else f"parity failed: {greedy} and {made.text!r}, transformers says {expected}"
            )
        )
        out.result(
            {
                "text": text,
                "token_ids": list(made.token_ids),
                "tokens": len(made.token_ids),
                "finish_reason": made.finish_reason,
                "peers": len(found.peers),
                "generation": made.generation,
                "tokens_per_s": round(tokens_per_s, 2),
                "parity": parity,
                "greedy_token_ids_by_peer": [list(tokens) for tokens in greedy],
                "reference_token_ids": list(expected),
                "ranks": ranks_document(found),
                "replicas": replicas,
                "elastic": elastic,
                "http_url": url,
                "model": TINY_MOE,
                "seconds": round(time.monotonic() - began, 2),
            }
        )
    if not parity:
        raise typer.Exit(1)


async def _on_every_peer(directory: Directory, prompt_ids: Sequence[int]) -> list[tuple[int, ...]]:
    """The prompt's greedy tokens, from each peer, all at the same time."""
    from ray_moe.engine.sampling import SamplingParams
    from ray_moe.sdk import Client

    client, params = Client(directory), SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0)
    each = (client.generate(prompt_ids, params, peer=peer) for peer in range(len(directory.ranks)))
    return [made.token_ids for made in await asyncio.gather(*each)]


def _chat(url: str) -> Iterator[str]:
    """The pieces of a streamed chat completion (server-sent events of OpenAI's API)."""
    import httpx

    body = {"model": TINY_MOE, "messages": _MESSAGES, "stream": True, "max_tokens": _MAX_TOKENS}
    body |= {"temperature": _TEMPERATURE, "seed": _SEED}
    # A proxy of the environment knows nothing about this machine's own ports.
    with (
        httpx.Client(trust_env=False, timeout=_HTTP_S) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        if response.status_code != httpx.codes.OK:
            raise NotServingError(f"{url} answered {response.status_code}: {response.read().decode(errors='replace')}")
        yield from _pieces(response)


def _pieces(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise NotServingError(f"the stream ended with an error: {event['error'].get('message')}")
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""
    raise NotServingError("the stream ended without [DONE]")


def reference_tokens(model: Path, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """Greedy tokens of transformers' own model in fp32 with its eager experts: one process, nothing of ours."""
    reference, end_ids = _reference(model)
    tokens: list[int] = []
    for token in _greedy(reference, prompt_ids):
        tokens.append(token)
        if len(tokens) == max_tokens or token in end_ids:
            break
    return tuple(tokens)


def endless_reference(model: Path, prompt_ids: Sequence[int], count: int) -> tuple[int, ...]:
    """The same, past every end of sequence."""
    reference, _ = _reference(model)
    return tuple(islice(_greedy(reference, prompt_ids), count))


def _reference(model: Path) -> tuple[PreTrainedModel, set[int]]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager")
    ends = reference.generation_config.eos_token_id
    return reference, {ends} if isinstance(ends, int) else set(ends or ())


def _greedy(reference: PreTrainedModel, prompt_ids: Sequence[int]) -> Iterator[int]:
    import torch

    cache, step_ids = None, torch.tensor([list(prompt_ids)])
    while True:
        with torch.inference_mode():
            answer = reference(step_ids, past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        token = int(answer.logits[0, -1].argmax())
        yield token
        step_ids = torch.tensor([[token]])
