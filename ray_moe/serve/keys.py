"""API keys and admin tokens: read from a file or the environment, kept as SHA-256 digests, compared in constant time.

A key never leaves the process that read it: what goes into a Serve configuration, and to replicas, is its digest.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_moe.errors import ConfigError

API_KEYS, ADMIN_TOKENS = "RAY_MOE_API_KEYS", "RAY_MOE_ADMIN_TOKENS"
SHORTEST = 16  # characters: digests of shorter keys could be guessed


@dataclass(frozen=True)
class Keys:
    """Digests of the keys that are accepted; without any, nothing is."""

    digests: tuple[str, ...] = ()

    def accept(self, key: str) -> bool:
        """Whether this is one of the keys. Takes the same time whichever it is, and for any that is none."""
        digest, found = digest_of(key), False
        for known in self.digests:
            found |= hmac.compare_digest(digest, known)
        return found


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(file: str | None, variable: str) -> tuple[str, ...]:
    """Digests of the keys in `file`, one per line, and in the environment `variable`, separated by commas.

    Blank lines and lines that begin with # are no keys. Raises `ConfigError` naming the source, never a key.
    """
    sources: list[tuple[str, Iterable[str]]] = []
    if file is not None:
        try:
            sources.append((file, Path(file).read_text(encoding="utf-8").splitlines()))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: keys cannot be read: {type(error).__name__}") from error
    if os.environ.get(variable):
        sources.append((variable, os.environ[variable].split(",")))
    return tuple(dict.fromkeys(digest for source, lines in sources for digest in _digests(source, list(lines))))


def _digests(source: str, lines: Sequence[str]) -> list[str]:
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    for place, key in enumerate(keys, 1):
        if len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{source}: key {place} has {len(key)} characters; a key has at least {SHORTEST} printable ASCII "
                "characters and no blank"
            )
    return [digest_of(key) for key in keys]
