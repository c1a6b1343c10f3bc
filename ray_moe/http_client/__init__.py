"""A cluster over HTTP: `MoEClient` and `AsyncMoEClient`. Needs httpx alone; calls of expert layers need torch too.

Any OpenAI client works as well; these two add typed errors, retries that never run a request twice, and expert layers.
"""

from ray_moe.http_client.answers import Answer, Choice, Chunk
from ray_moe.http_client.clients import AsyncMoEClient, MoEClient
from ray_moe.http_client.failures import (
    AnswerTimeoutError,
    AuthenticationError,
    BadRequestError,
    BrokenAnswerError,
    ClientError,
    DeadlineExceededError,
    NotFoundError,
    RateLimitedError,
    ServerFailedError,
    StatusError,
    UnavailableError,
    UnreachableError,
)
from ray_moe.http_client.retries import Retries

__all__ = [
    "Answer",
    "AnswerTimeoutError",
    "AsyncMoEClient",
    "AuthenticationError",
    "BadRequestError",
    "BrokenAnswerError",
    "Choice",
    "Chunk",
    "ClientError",
    "DeadlineExceededError",
    "MoEClient",
    "NotFoundError",
    "RateLimitedError",
    "Retries",
    "ServerFailedError",
    "StatusError",
    "UnavailableError",
    "UnreachableError",
]
