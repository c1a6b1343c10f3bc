"""One request of a batch, answered by what answers HTTP."""

from __future__ import annotations

from ray.exceptions import RayError

from ray_moe.batch.rows import Ask, Document
from ray_moe.serve.answers import Answer, prepare
from ray_moe.serve.asking import Bounds
from ray_moe.serve.generation import Backends
from ray_moe.serve.problems import unknown_model
from ray_moe.serve.replies import ChatReply, CompletionReply, Reply
from ray_moe.serve.schema import ChatRequest

_NO_BOUNDS = Bounds()


class Answers:
    """Answers requests on the cluster behind `backends`, which looks it up again after it was lost."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    async def answer(self, ask: Ask) -> Document:
        """The whole answer. Raises `RequestError` for what cannot be done; `PeerLostError`, `NotServingError` or one of
        Ray's errors when the cluster is gone; `DeadlineError`."""
        backend = await self._backends.current()
        if ask.body.model != backend.model:
            raise unknown_model(ask.body.model, backend.model)
        work = await prepare(self._backends, backend, ask.body, _NO_BOUNDS)
        kind: type[Reply] = ChatReply if isinstance(ask.body, ChatRequest) else CompletionReply
        reply = kind.begin(backend.model, backend.release_id, work.leads)
        answer = Answer(self._backends, backend, work, reply.request_id)
        try:
            choices = await answer.whole()
        except RayError:
            self._backends.failed(backend)
            raise
        finally:
            answer.close()
        return reply.whole(choices, answer.usage)
