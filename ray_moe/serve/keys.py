"""API keys and admin tokens: read from a file or the environment, kept as SHA-256 digests, compared in constant time.

A key never leaves the process that read it: what goes into a Serve configuration, and to replicas, is its digest.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ray_moe.errors import ConfigError
from ray_moe.serve.schema import AppArgs

API_KEYS, ADMIN_TOKENS = "RAY_MOE_API_KEYS", "RAY_MOE_ADMIN_TOKENS"
SHORTEST = 16  # characters: digests of shorter keys could be guessed


@dataclass(frozen=True)
class Keys:
    """Digests of the keys that are accepted; without any, nothing is.

    `secret` signs what is given to whoever has shown a key. It is random, made with the object, and travels in no
    configuration, text or comparison of it: whoever knows the digests cannot sign. A pickled copy, as every replica of
    an application has, signs alike.
    """

    digests: tuple[str, ...] = ()
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False, compare=False)

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


# -- Of an application


def with_digests(args: AppArgs) -> AppArgs:
    """The arguments with the digests of their keys, read here, instead of where these lie. Raises `ConfigError`."""
    return args.model_copy(
        update={
            "api_keys_file": None,
            "admin_tokens_file": None,
            "api_key_digests": args.api_key_digests or read_keys(args.api_keys_file, API_KEYS),
            "admin_token_digests": args.admin_token_digests or read_keys(args.admin_tokens_file, ADMIN_TOKENS),
        }
    )


def args_for(host: str, args: AppArgs) -> AppArgs:
    """The arguments for an application at `host`, with their keys' digests: on a loopback address an API key is not
    needed, and where there is none `no_auth` is set.

    Raises `ConfigError` for keys that cannot be read, and on any other address without an API key or `no_auth`.
    """
    found = with_digests(args)
    if found.api_key_digests or found.no_auth:
        return found
    if not _is_loopback(host):
        raise ConfigError(
            f"host is {host}, which others can reach, and there is no API key: name a file of them (--api-keys-file), "
            f"set {API_KEYS}, or let everybody in (--no-auth)"
        )
    return found.model_copy(update={"no_auth": True})


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may lead anywhere


def guarded_args(host: str, api_keys: Path | None, admin_tokens: Path | None, *, no_auth: bool) -> AppArgs:
    """`args_for` an application with nothing but its keys' files named. Raises as it."""
    files = {"api_keys_file": api_keys, "admin_tokens_file": admin_tokens}
    named = {field: str(path) for field, path in files.items() if path is not None}
    return args_for(host, AppArgs.parse({**named, "no_auth": no_auth}))
