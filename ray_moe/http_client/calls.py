"""What a client sends, and what an answer that is no success means: pure, for the sync and the async client alike."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from ray_moe.errors import ConfigError
from ray_moe.http_client.failures import (
    AnswerTimeoutError,
    BrokenAnswerError,
    ClientError,
    StatusError,
    UnreachableError,
    status_error,
)

if TYPE_CHECKING:
    from torch import Tensor

API_KEY = "RAY_MOE_API_KEY"
COMPLETIONS, CHAT, MODELS, READY = "/v1/completions", "/v1/chat/completions", "/v1/models", "/ready"
TENSORS = "application/octet-stream"
# One request with tensors has about so many bytes at most; more tokens go in several.
TENSOR_BYTES = 4 * 2**20
_CONNECT_S = 5.0
# An idle connection is given up before the server does so, or a request could meet its end.
_IDLE_S = 2.0

Prompt = str | Sequence[int] | Sequence[str]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Call:
    """One request."""

    method: str
    path: str
    json: Mapping[str, Any] | None = None
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def build(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        return http.build_request(
            self.method, self.path, json=self.json, content=self.content, headers=dict(self.headers)
        )


def options(base_url: str, api_key: str | None, timeout: float) -> dict[str, Any]:
    """What both clients are made with. `ConfigError` for an address that is none, or seconds that are not above 0."""
    url = httpx.URL(base_url.rstrip("/").removesuffix("/v1"))
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"base_url must be http://HOST:PORT or https://HOST:PORT, found {base_url!r}")
    if not timeout > 0:
        raise ConfigError(f"timeout must be > 0 seconds, found {timeout}")
    key = os.environ.get(API_KEY) if api_key is None else api_key
    return {
        "base_url": url,
        "headers": {"authorization": f"Bearer {key}"} if key else {},
        "timeout": httpx.Timeout(timeout, connect=min(_CONNECT_S, timeout)),
        "limits": httpx.Limits(keepalive_expiry=_IDLE_S),
    }


def generation(path: str, model: str, what: Mapping[str, Any], stream: bool, request_id: str | None) -> Call:
    """A completion or a chat."""
    body = {"model": model, **what, **({"stream": True} if stream else {})}
    return Call("POST", path, json=body, headers=_identified(request_id))


def model_name(document: Any) -> str:
    """The name of the model that a server has, from its list."""
    try:
        return str(document["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise BrokenAnswerError(f"the server lists no model: {document!r}") from error


def _identified(request_id: str | None) -> dict[str, str]:
    return {} if request_id is None else {"x-request-id": request_id}


def failure_of(error: httpx.HTTPError, base_url: httpx.URL) -> ClientError:
    """What an error of the transport means for the request."""
    what = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return UnreachableError(f"{base_url} cannot be reached: {what}")
    if isinstance(error, httpx.TimeoutException):
        return AnswerTimeoutError(f"{base_url} did not answer in time: {what}")
    return BrokenAnswerError(f"the connection to {base_url} broke: {what}")


def refusal_of(response: httpx.Response) -> StatusError:
    """What an answer that is no success means; it has been read."""
    return status_error(response.status_code, response.content, response.headers)


# ---- tensors ----


def tensor_calls(layer: int, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> list[Call]:
    """Requests for one layer, in the order of tokens; `ConfigError` for tensors of different lengths."""
    from safetensors.torch import save

    lengths = {tensor.shape[0] if tensor.ndim else -1 for tensor in (hidden_TD, topk_ids_TK, topk_weights_TK)}
    if len(lengths) > 1 or -1 in lengths:
        raise ConfigError(f"hidden, topk_ids and topk_weights must have one row per token, found {sorted(lengths)}")
    tokens = hidden_TD.shape[0]
    row = sum(tensor[:1].nbytes for tensor in (hidden_TD, topk_ids_TK, topk_weights_TK))
    step = max(1, TENSOR_BYTES // max(1, row))
    calls = []
    for start in range(0, tokens, step) or (0,):
        end = min(tokens, start + step)
        cut = {
            name: tensor.detach()[start:end].cpu().contiguous().clone()
            for name, tensor in (("hidden", hidden_TD), ("topk_ids", topk_ids_TK), ("topk_weights", topk_weights_TK))
        }
        path = f"/v1/experts/{layer}/forward"
        calls.append(Call("POST", path, content=save(cut), headers={"content-type": TENSORS}))
    return calls


def tensor_of(response: httpx.Response) -> Tensor:
    """The output of a layer; `BrokenAnswerError` when the answer holds none."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(response.content)["output"]
    except (SafetensorError, KeyError) as error:
        raise BrokenAnswerError(f"the answer holds no output tensor: {error!r}") from error
