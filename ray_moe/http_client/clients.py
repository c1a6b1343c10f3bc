"""The two clients. They differ in how they wait, and in nothing else: `calls`, `answers` and `retries` do the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Self

import httpx

from ray_moe.deadline import Deadline, pause
from ray_moe.http_client import calls
from ray_moe.http_client.answers import Answer, Chunk, Events, answer_of
from ray_moe.http_client.calls import Call, Messages, Prompt
from ray_moe.http_client.failures import BrokenAnswerError, ClientError, UnreachableError
from ray_moe.http_client.retries import Retries

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT_S = 600.0


class MoEClient:
    """A cluster's HTTP API. May be used by several threads; `close` it, or use it as a context.

    `base_url` is http://HOST:PORT. Without `api_key` the environment's RAY_MOE_API_KEY is used, if there is one;
    without `model` the one that the server has. `timeout` bounds, in seconds, every wait for a next part of an answer,
    and the tries of one request together. Every method raises `ClientError` and what derives from it.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = TIMEOUT_S,
        retries: Retries | None = None,
    ) -> None:
        self._http = httpx.Client(**calls.options(base_url, api_key, timeout))
        self._model, self._timeout, self._retries = model, timeout, retries or Retries()

    # ---- text ----

    def complete(self, prompt: Prompt, *, request_id: str | None = None, **parameters: Any) -> Answer:
        """Continue a prompt, text or token ids. `parameters` are those of OpenAI's completions, and top_k, min_p."""
        return self._answer(calls.COMPLETIONS, {"prompt": prompt, **parameters}, request_id)

    def chat(self, messages: Messages, *, request_id: str | None = None, **parameters: Any) -> Answer:
        """The assistant's next turn. `parameters` are those of OpenAI's chat completions, and top_k, min_p."""
        return self._answer(calls.CHAT, {"messages": list(messages), **parameters}, request_id)

    def stream_complete(self, prompt: Prompt, *, request_id: str | None = None, **parameters: Any) -> Stream:
        """As `complete`, in chunks as they come."""
        return self._stream(calls.COMPLETIONS, {"prompt": prompt, **parameters}, request_id)

    def stream_chat(self, messages: Messages, *, request_id: str | None = None, **parameters: Any) -> Stream:
        """As `chat`, in chunks as they come."""
        return self._stream(calls.CHAT, {"messages": list(messages), **parameters}, request_id)

    # ---- the server ----

    @property
    def model(self) -> str:
        """The model that requests name."""
        if self._model is None:
            self._model = calls.model_name(_json(self._read(Call("GET", calls.MODELS))))
        return self._model

    def ready(self) -> bool:
        """Whether the server answers and its cluster serves; asks once."""
        try:
            return self._http.get(calls.READY).is_success
        except httpx.HTTPError:
            return False

    # ---- layers ----

    def experts(self, layer: int) -> LayerOverHTTP:
        """One MoE layer, to be called by itself."""
        return LayerOverHTTP(self, layer)

    # ---- one request ----

    def _answer(self, path: str, what: dict[str, Any], request_id: str | None) -> Answer:
        model = what.pop("model", None) or self.model
        return answer_of(_json(self._read(calls.generation(path, model, what, False, request_id))))

    def _stream(self, path: str, what: dict[str, Any], request_id: str | None) -> Stream:
        model = what.pop("model", None) or self.model
        return Stream(self._open(calls.generation(path, model, what, True, request_id)))

    def _read(self, call: Call) -> httpx.Response:
        """The whole answer to a request."""
        response = self._open(call)
        try:
            response.read()
        except httpx.HTTPError as error:
            raise calls.failure_of(error, self._http.base_url) from error
        finally:
            response.close()
        return response

    def _open(self, call: Call) -> httpx.Response:
        """An answer that is a success, its body still to be read; sends the request again where that is safe."""
        deadline, tried = Deadline(self._timeout), 0
        while True:
            try:
                response = self._http.send(call.build(self._http), stream=True)
                if response.is_success:
                    return response
                with closing(response):
                    response.read()
                failure: ClientError = calls.refusal_of(response)
            except httpx.HTTPError as error:
                failure = calls.failure_of(error, self._http.base_url)
                if not isinstance(failure, UnreachableError):
                    raise failure from error
            wait = self._retries.delay(tried, failure, deadline.left)
            if wait is None:
                raise failure
            pause(wait)
            tried += 1

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """Chunks of one answer. Closing it, or leaving it as a context, ends the generation if it still runs."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._chunks = self._read()

    @property
    def request_id(self) -> str:
        return self._response.headers.get("x-request-id", "")

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def _read(self) -> Iterator[Chunk]:
        events = Events(self.request_id)
        try:
            for line in self._response.iter_lines():
                yield from events.chunks(line)
            events.require_end()
        except httpx.HTTPError as error:
            raise calls.failure_of(error, self._response.url) from error
        finally:
            self._response.close()

    def close(self) -> None:
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LayerOverHTTP:
    """One MoE layer of a server's model, called with tensors; they travel as safetensors."""

    def __init__(self, client: MoEClient, layer: int) -> None:
        self.layer, self._client = layer, client

    def forward(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """Gate-weighted sums [T, D] of the routed experts, on the device of `hidden_TD` [T, D].

        `topk_ids_TK` [T, K] int32 or int64, `topk_weights_TK` [T, K] in the dtype of the model's router.
        """
        parts = []
        for call in calls.tensor_calls(self.layer, hidden_TD, topk_ids_TK, topk_weights_TK):
            parts.append(calls.tensor_of(self._client._read(call)))
        return _joined(parts, hidden_TD)


class AsyncMoEClient:
    """`MoEClient` for asyncio. Belongs to one event loop; `aclose` it, or use it as a context."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = TIMEOUT_S,
        retries: Retries | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(**calls.options(base_url, api_key, timeout))
        self._model, self._timeout, self._retries = model, timeout, retries or Retries()

    async def complete(self, prompt: Prompt, *, request_id: str | None = None, **parameters: Any) -> Answer:
        """As `MoEClient.complete`."""
        return await self._answer(calls.COMPLETIONS, {"prompt": prompt, **parameters}, request_id)

    async def chat(self, messages: Messages, *, request_id: str | None = None, **parameters: Any) -> Answer:
        """As `MoEClient.chat`."""
        return await self._answer(calls.CHAT, {"messages": list(messages), **parameters}, request_id)

    async def stream_complete(self, prompt: Prompt, *, request_id: str | None = None, **parameters: Any) -> AsyncStream:
        """As `MoEClient.stream_complete`."""
        return await self._stream(calls.COMPLETIONS, {"prompt": prompt, **parameters}, request_id)

    async def stream_chat(self, messages: Messages, *, request_id: str | None = None, **parameters: Any) -> AsyncStream:
        """As `MoEClient.stream_chat`."""
        return await self._stream(calls.CHAT, {"messages": list(messages), **parameters}, request_id)

    async def model(self) -> str:
        """The model that requests name."""
        if self._model is None:
            self._model = calls.model_name(_json(await self._read(Call("GET", calls.MODELS))))
        return self._model

    async def ready(self) -> bool:
        """Whether the server answers and its cluster serves; asks once."""
        try:
            return (await self._http.get(calls.READY)).is_success
        except httpx.HTTPError:
            return False

    def experts(self, layer: int) -> AsyncLayerOverHTTP:
        """One MoE layer, to be called by itself."""
        return AsyncLayerOverHTTP(self, layer)

    async def _answer(self, path: str, what: dict[str, Any], request_id: str | None) -> Answer:
        model = what.pop("model", None) or await self.model()
        return answer_of(_json(await self._read(calls.generation(path, model, what, False, request_id))))

    async def _stream(self, path: str, what: dict[str, Any], request_id: str | None) -> AsyncStream:
        model = what.pop("model", None) or await self.model()
        return AsyncStream(await self._open(calls.generation(path, model, what, True, request_id)))

    async def _read(self, call: Call) -> httpx.Response:
        response = await self._open(call)
        try:
            await response.aread()
        except httpx.HTTPError as error:
            raise calls.failure_of(error, self._http.base_url) from error
        finally:
            await response.aclose()
        return response

    async def _open(self, call: Call) -> httpx.Response:
        deadline, tried = Deadline(self._timeout), 0
        while True:
            try:
                response = await self._http.send(call.build(self._http), stream=True)
                if response.is_success:
                    return response
                try:
                    await response.aread()
                finally:
                    await response.aclose()
                failure: ClientError = calls.refusal_of(response)
            except httpx.HTTPError as error:
                failure = calls.failure_of(error, self._http.base_url)
                if not isinstance(failure, UnreachableError):
                    raise failure from error
            wait = self._retries.delay(tried, failure, deadline.left)
            if wait is None:
                raise failure
            await asyncio.sleep(wait)
            tried += 1

    async def aclose(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncStream:
    """`Stream` for asyncio."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._chunks = self._read()

    @property
    def request_id(self) -> str:
        return self._response.headers.get("x-request-id", "")

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def _read(self) -> AsyncIterator[Chunk]:
        events = Events(self.request_id)
        try:
            async for line in self._response.aiter_lines():
                for chunk in events.chunks(line):
                    yield chunk
            events.require_end()
        except httpx.HTTPError as error:
            raise calls.failure_of(error, self._response.url) from error
        finally:
            await self._response.aclose()

    async def aclose(self) -> None:
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncLayerOverHTTP:
    """`LayerOverHTTP` for asyncio."""

    def __init__(self, client: AsyncMoEClient, layer: int) -> None:
        self.layer, self._client = layer, client

    async def forward(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """As `LayerOverHTTP.forward`."""
        parts = []
        for call in calls.tensor_calls(self.layer, hidden_TD, topk_ids_TK, topk_weights_TK):
            parts.append(calls.tensor_of(await self._client._read(call)))
        return _joined(parts, hidden_TD)


def _joined(parts: list[Tensor], like_TD: Tensor) -> Tensor:
    import torch

    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(like_TD.device)


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise BrokenAnswerError(f"the answer is not JSON: {response.text[:80]!r}") from error
