"""A cluster without asyncio: whole generations and bare expert layers, for scripts and notebooks on its Ray cluster.

One thread runs an event loop with a `Client`; every method hands it work and waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from ray_moe import cluster as clusters
from ray_moe.actors.remote import NAMESPACE
from ray_moe.cluster import Cluster
from ray_moe.deadline import wait_future
from ray_moe.engine.records import ModelFacts, StreamRecord
from ray_moe.engine.sampling import SamplingParams
from ray_moe.errors import ConfigError, NotServingError
from ray_moe.sdk.client import Client, Generation
from ray_moe.sdk.experts import Experts, ExpertsCall
from ray_moe.text import TextStream, load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_T = TypeVar("_T")
_CLOSE_S = 10.0


def connect(address: str | None = None, *, cluster: str = "default") -> ClusterClient:
    """A client of the cluster of this name on the Ray cluster at `address` (default: the one this process is connected
    to, else the one that runs on this machine).

    Raises `NotServingError` when there is no such Ray cluster, or no such cluster on it.
    """
    if not ray.is_initialized():
        try:
            ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise NotServingError(f"no Ray cluster answers at {address or 'auto'!r}: {error}") from error
    return ClusterClient(clusters.connect(cluster))


class ClusterClient:
    """Generations and layers of one cluster. May be used by several threads; `close` it, or use it as a context.

    `cluster` has the verbs that change it. Raises as `Client` does; `NotServingError` after `close`.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        directory = cluster.directory()
        self._config = directory.config
        self._loop = asyncio.new_event_loop()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"client-of-{cluster.name}", daemon=True)
        self._thread.start()

        async def client() -> Client:  # it belongs to the loop that makes it
            return Client(directory)

        self._client = self.run(client(), self._config.step_deadline_s, "a client")

    # ---- whole generations ----

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **sampling: Any
    ) -> Generation:
        """One generation, whole. `prompt` is text or token ids; sampling parameters come as an object or by name.

        Stop strings belong to text: `stream_text` looks for them.
        """
        params = _params(params, sampling)
        seconds = self._config.request_deadline_s * (params.max_tokens + 1)
        return self.run(self._client.generate(self._ids(prompt), params), seconds, "a generation")

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **sampling: Any
    ) -> Iterator[StreamRecord]:
        """The records of one generation as steps deliver them. Closing the iterator cancels the request."""
        records = self._client.stream(self._ids(prompt), _params(params, sampling))
        seconds = self._config.request_deadline_s + self._config.step_deadline_s
        try:
            while (record := self.run(_next(records), seconds, "the next record")) is not None:
                yield record
        finally:
            self.run(records.aclose(), self._config.step_deadline_s, "the end of a stream")

    def stream_text(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **sampling: Any
    ) -> Iterator[str]:
        """The text of one generation, piece by piece, up to a stop string if one is given."""
        params = _params(params, sampling)
        text = TextStream(self.tokenizer, params.stop)
        for record in self.stream(prompt, params):
            piece = ""
            for token in record.token_ids:
                piece += text.push((token,))
                if text.stopped:
                    break
            piece += text.finish() if record.finish_reason is not None and not text.stopped else ""
            if piece:
                yield piece
            if text.stopped:
                return

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's own. `ConfigError` for a model without one."""
        directory = self._client.directory
        return load_tokenizer(directory.model_path, trust_remote_code=directory.config.trust_remote_code)

    def _ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        return list(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt

    # ---- layers ----

    def experts(self, layer: int) -> LayerExperts:
        """One MoE layer, to be called by itself; `ConfigError` for a layer without routed experts."""
        return LayerExperts(self, self._client.experts(layer))

    @property
    def facts(self) -> ModelFacts:
        """Sizes of the model, and the version of its checkpoint."""
        return self._client.directory.facts

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have routed experts."""
        return self.facts.moe_layers

    # ---- its thread ----

    def run(self, work: Coroutine[Any, Any, _T], seconds: float, what: str) -> _T:
        """Await `work` on the client's thread."""
        if self._closed.is_set():
            work.close()
            raise NotServingError(f"the client of cluster {self.cluster.name!r} is closed")
        return wait_future(asyncio.run_coroutine_threadsafe(work, self._loop), seconds, what)

    @property
    def call_seconds(self) -> float:
        """The longest that a call of a layer takes before it ends with an error of its own."""
        return 2 * (self._config.call_lease_s + self._config.step_deadline_s)

    def close(self) -> None:
        """End the thread. The cluster goes on."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_CLOSE_S)

    def __enter__(self) -> ClusterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LayerExperts:
    """`Experts`, without asyncio."""

    def __init__(self, client: ClusterClient, experts: Experts) -> None:
        self.layer, self._client, self._experts = experts.layer, client, experts

    def forward(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """As `Experts.forward`."""
        work = self._experts.forward(hidden_TD, topk_ids_TK, topk_weights_TK)
        return self._client.run(work, self._client.call_seconds, f"a call of layer {self.layer}")

    def dispatch(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> LayerCall:
        """As `Experts.dispatch`."""
        work = self._experts.dispatch(hidden_TD, topk_ids_TK, topk_weights_TK)
        seconds = self._client.call_seconds
        return LayerCall(self._client, self._client.run(work, seconds, f"dispatch to layer {self.layer}"))


class LayerCall:
    """`ExpertsCall`, without asyncio."""

    def __init__(self, client: ClusterClient, call: ExpertsCall) -> None:
        self._client, self._call = client, call

    @property
    def handle_ids(self) -> tuple[str, ...]:
        return self._call.handle_ids

    def combine(self) -> Tensor:
        """As `ExpertsCall.combine`."""
        return self._client.run(self._call.combine(), self._client.call_seconds, "a combine")

    def abandon(self) -> None:
        """As `ExpertsCall.abandon`."""
        self._call.abandon()


async def _next(records: AsyncGenerator[StreamRecord, None]) -> StreamRecord | None:
    return await anext(records, None)


def _params(params: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
    if params is not None and sampling:
        raise ConfigError(f"sampling parameters come as an object or by name, found both: {', '.join(sampling)}")
    return SamplingParams(**sampling) if params is None else params
