"""Expert layers over HTTP: tensors come and go as safetensors, which hold numbers and names and nothing to execute."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from safetensors import SafetensorError
from safetensors.torch import load, save
from starlette.exceptions import HTTPException
from starlette.responses import Response
from torch import Tensor

from ray_moe.deadline import wait_for
from ray_moe.errors import HandleError, NotServingError, PeerLostError, RequestError
from ray_moe.serve.admission import Gate
from ray_moe.serve.generation import Backends
from ray_moe.serve.openapi import failures

TENSORS = "application/octet-stream"
NAMES = ("hidden", "topk_ids", "topk_weights")
_READ_S = 60.0  # parsing a body of bounded size
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_WRONG_TYPE: dict[int | str, dict[str, Any]] = {
    415: {**failures(415)[415], "description": f"The body is not declared as {TENSORS}."}
}


def experts_routes(backends: Backends, gate: Gate) -> APIRouter:
    """The route of expert layers; a call has its place among the requests that the replica takes on."""
    routes = APIRouter()

    @routes.post(
        "/v1/experts/{layer}/forward",
        response_model=None,
        response_class=Response,
        responses={
            200: {"description": "Safetensors with `output` [T, D].", "content": {TENSORS: _BINARY}},
            **failures(400, 401, 413, 429, 503, 504),
            **_WRONG_TYPE,
        },
        openapi_extra={"requestBody": {"required": True, "content": {TENSORS: _BINARY}}},
    )
    async def forward(layer: Annotated[int, Path(ge=0, le=2**31)], request: Request) -> Response:
        """Run the routed experts of one layer. The body is safetensors with `hidden` [T, D] in the cluster's dtype,
        `topk_ids` [T, K] and `topk_weights` [T, K] in the dtype of the model's router."""
        given = request.headers.get("content-type", "")
        if given.partition(";")[0].strip().lower() != TENSORS:
            raise HTTPException(415, f"Content-Type is {given!r}; it must be {TENSORS}")
        backend = await backends.current()
        experts = backend.client.experts(layer)
        body = await request.body()
        tensors = await wait_for(asyncio.to_thread(_tensors, body), _READ_S, "reading the tensors")
        place = await gate.enter(1)
        # In a task of its own: whoever goes away takes the call with it, and no call of another request.
        call = backends.spawn(experts.forward(*tensors))
        try:
            output_TD = await call
        except (PeerLostError, NotServingError):
            backends.failed(backend)
            raise
        except HandleError as error:
            raise NotServingError(f"layer {layer} cannot be called now: {error}") from error
        finally:
            call.cancel()
            place.leave()
        return Response(save({"output": output_TD.contiguous()}, {"release": backend.release_id}), media_type=TENSORS)

    return routes


def _tensors(body: bytes) -> tuple[Tensor, Tensor, Tensor]:
    try:
        found = load(body)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise RequestError(f"the request body is not safetensors: {error}") from error
    if set(found) != set(NAMES):
        raise RequestError(f"the request body holds the tensors {sorted(found)}; it must hold {sorted(NAMES)}")
    return found["hidden"], found["topk_ids"], found["topk_weights"]
