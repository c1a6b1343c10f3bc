"""generate: one generation, on a cluster of its own or on one that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_moe.cli.connection import attached, cpus_for, local_ray, locate
from ray_moe.cli.options import (
    Address,
    AsJson,
    ConfigFile,
    Device,
    Dtype,
    Model,
    Name,
    Peers,
    Replicas,
    Revision,
    Settings,
    SpareSlots,
    TrustRemoteCode,
    cluster_config,
    resolved_model,
)
from ray_moe.cli.output import Output, output
from ray_moe.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ray_moe.actors.reports import ClusterStatus, Directory
    from ray_moe.cluster import Cluster
    from ray_moe.config import ClusterConfig
    from ray_moe.engine.sampling import SamplingParams


def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", help="The text to continue.")] = None,
    prompt_token_ids: Annotated[
        str | None, typer.Option("--prompt-token-ids", metavar="ID,ID,...", help="The same as token ids.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option("--top-p")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option("--seed", help="Equal seeds draw equal tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end.")] = False,
    model: Model = None,
    peers: Peers = None,
    spare_slots: SpareSlots = None,
    replicas: Replicas = None,
    settings: Settings = None,
    config: ConfigFile = None,
    name: Name = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Generate from one prompt. Without --address it starts a cluster in a Ray of its own, and both end with it."""
    ids = _one_prompt(prompt, prompt_token_ids)
    placement = {"peers": peers, "spare_slots": spare_slots, "replicas": replicas}
    wanted = (
        cluster_config(
            config,
            settings,
            model=model,
            name=name,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            **placement,
        )
        if address is None
        else None
    )
    if wanted is None and (misplaced := [option for option, value in placement.items() if value is not None]):
        raise ConfigError(f"{', '.join(misplaced)}: a running cluster (--address) has its own; leave these out")
    from ray_moe.engine.sampling import SamplingParams  # torch: a typing mistake above is told at once

    params = SamplingParams(max_tokens, temperature, top_p, top_k, seed, tuple(stop or ()), ignore_eos)
    with output(as_json) as out, _running(wanted, address, name or "default", model, out) as cluster:
        directory = cluster.directory()
        tokenizer = _tokenizer(directory, needed=ids is None or bool(params.stop))
        if ids is None:
            # As /v1/completions does it: with the special tokens that the tokenizer puts round a text.
            ids = tuple(_present(tokenizer).encode(prompt or ""))
        made = asyncio.run(one_generation(directory, ids, params, tokenizer, out.text))
        out.text("\n" if tokenizer is not None else f"{list(made.token_ids)}\n")
        found = cluster.status()
        out.say(f"{len(made.token_ids)} tokens, {made.finish_reason}, generation {made.generation}")
        out.result(generation_document(made, found))


@dataclass(frozen=True)
class Generated:
    """A finished generation. `text` is None without a tokenizer; `generation` is the placement's, at the last token."""

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    generation: int


async def one_generation(
    directory: Directory,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    tokenizer: PreTrainedTokenizerBase | None,
    on_text: Callable[[str], None],
) -> Generated:
    """Generate and hand out text as it becomes certain; a stop string ends it at the token that completes it."""
    from ray_moe.sdk import Client
    from ray_moe.text import TextStream

    stream = TextStream(tokenizer, params.stop) if tokenizer is not None else None
    tokens: list[int] = []
    pieces: list[str] = []
    reason, generation = "cancelled", 0

    def add(piece: str) -> None:
        pieces.append(piece)
        on_text(piece)

    records = Client(directory).stream(prompt_ids, params)
    # Leaving the loop early closes the stream, and that cancels the request.
    async with aclosing(records):
        async for record in records:
            generation, reason = record.generation, record.finish_reason or reason
            for token in record.token_ids:
                tokens.append(token)
                if stream is not None:
                    add(stream.push((token,)))
                    if stream.stopped:
                        break
            if stream is not None and stream.stopped:
                reason = "stop"
                break
    if stream is not None:
        add(stream.finish())
    return Generated(tuple(tokens), "".join(pieces) if stream is not None else None, reason, generation)


def generation_document(made: Generated, found: ClusterStatus) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        "token_ids": list(made.token_ids),
        "text": made.text,
        "finish_reason": made.finish_reason,
        "peers": len(found.peers),
        "generation": made.generation,
        "ranks": ranks_document(found),
    }


def ranks_document(found: ClusterStatus) -> list[dict[str, Any]]:
    """Per rank, from the layers' own counters: experts held by layer, and rows that crossed to another peer.

    `rows_dispatched` went out to be computed elsewhere, `rows_computed` came in for the experts here; each of them
    returns, so `rows_sent` and `rows_received` count both ways. `rows_local` never left.
    """
    return [
        {
            "rank": peer.rank,
            "rows_sent": peer.rows_sent + peer.rows_received,
            "rows_received": peer.rows_received + peer.rows_sent,
            "rows_dispatched": peer.rows_sent,
            "rows_computed": peer.rows_received,
            "rows_local": peer.rows_local,
            "steps_agreed": peer.steps_agreed,
            "trunk_has_experts": peer.trunk_has_experts,
        }
        | {"resident_slots": {str(layer): slots for layer, slots in sorted(peer.resident_slots.items())}}
        for peer in found.peers
    ]


@contextmanager
def embedded(config: ClusterConfig, out: Output, ray: AbstractContextManager[None] | None = None) -> Iterator[Cluster]:
    """A cluster that ends with the block: in a Ray of this process alone, or on the connection that is given."""
    out.say(f"starting {config.peers} peers" + (" in a Ray of their own" if ray is None else ""))
    with ray or local_ray(cpus_for(config)):
        from ray_moe import cluster as clusters

        with out.loading() as draw:
            cluster = clusters.start(config, on_progress=draw)
        try:
            yield cluster
        finally:
            cluster.stop()


@contextmanager
def _running(
    wanted: ClusterConfig | None, address: str | None, name: str, model: str | None, out: Output
) -> Iterator[Cluster]:
    if wanted is not None:
        with embedded(wanted, out) as cluster:
            yield cluster
        return
    with attached(locate(address, name)):
        from ray_moe.cluster import connect

        cluster = connect(name)
        if model is not None:
            _require_model(cluster.directory(), model)
        yield cluster


def _require_model(directory: Directory, model: str) -> None:
    if resolved_model(model) not in (directory.config.model, str(directory.model_path)):
        raise ConfigError(f"cluster {directory.config.name!r} serves {directory.config.model}, not {model}")


def _one_prompt(prompt: str | None, token_ids: str | None) -> tuple[int, ...] | None:
    """The token ids, or None when the prompt is a text."""
    if (prompt is None) == (token_ids is None):
        raise RequestError("give either --prompt or --prompt-token-ids", "prompt")
    if token_ids is None:
        return None
    parts = [part.strip() for part in token_ids.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise RequestError(f"prompt-token-ids is {token_ids!r}; it must be whole numbers >= 0 and commas", "prompt")
    return tuple(int(part) for part in parts)


def _tokenizer(directory: Directory, needed: bool) -> PreTrainedTokenizerBase | None:
    """The model's; None when it has none and only token ids are asked for."""
    from ray_moe.text import load_tokenizer

    has_files = any(Path(directory.model_path, file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    if not needed and not has_files:
        return None
    return load_tokenizer(directory.model_path, trust_remote_code=directory.config.trust_remote_code)


def _present(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise ConfigError("a text prompt needs the model's tokenizer")
    return tokenizer
