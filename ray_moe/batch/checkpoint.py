"""What a job has done, so that it can be killed anywhere and run again.

The folder `OUT.job` holds `job.json`, which says what the job is, and parts: files of answers in the order in which
they were ready. A part appears whole or not at all, under a name of its own, so nothing that is there is ever written
again. Its first line lists its rows: taking a job up again reads that line of each part, and no answer.

A row may be answered twice, when a job was killed after its answer and before the part that holds it was on disk, or
when two machines run the same job: what the job puts out is the first one, once.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sqlite3
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Self

from ray_moe.batch.places import Place
from ray_moe.errors import ConfigError, RayMoEError

PART_ENTRIES = 1024
_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """What became of row `row`: a document of the output (`ok`), or of the errors file."""

    row: int
    ok: bool
    document: Mapping[str, Any]
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class Totals:
    """Rows that are done, those of them that have no answer, and the tokens of the others."""

    done: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: Totals) -> None:
        self.done += other.done
        self.errors += other.errors
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens

    @classmethod
    def of(cls, entry: Entry) -> Totals:
        return cls(1, not entry.ok, entry.prompt_tokens, entry.completion_tokens)


class RowSet:
    """Numbers of rows, a bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, row: int) -> None:
        place, bit = divmod(row, 8)
        if place >= len(self._bits):
            self._bits.extend(bytes(place + 1 - len(self._bits)))
        self._bits[place] |= 1 << bit

    def __contains__(self, row: int) -> bool:
        place, bit = divmod(row, 8)
        return place < len(self._bits) and bool(self._bits[place] >> bit & 1)


class Ids:
    """The ids that were seen, and the first row of each, in a database that spills to a temporary file."""

    def __init__(self) -> None:
        self._rows = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._rows.execute("PRAGMA journal_mode = OFF")
        self._rows.execute("PRAGMA synchronous = OFF")
        self._rows.execute("CREATE TABLE ids (id TEXT PRIMARY KEY, row INTEGER) WITHOUT ROWID")

    def first_row(self, custom_id: str, row: int) -> int:
        """The row that had this id first: `row` itself where nobody had."""
        try:
            self._rows.execute("INSERT INTO ids VALUES (?, ?)", (custom_id, row))
        except sqlite3.IntegrityError:
            found = self._rows.execute("SELECT row FROM ids WHERE id = ?", (custom_id,)).fetchone()
            return int(found[0])
        return row

    def close(self) -> None:
        self._rows.close()


@dataclass(frozen=True)
class Part:
    """One file of answers: its place, its first row, how many it has."""

    place: Place
    first: int
    count: int

    def entries(self) -> Iterator[Entry]:
        """By row. Raises `RayMoEError` for a file that is not whole."""
        lines = self.place.read().splitlines()[1:]
        if len(lines) != self.count:
            raise RayMoEError(f"{self.place} has {len(lines)} of {self.count} answers; remove it to have them again")
        for line in lines:
            yield Entry(*json.loads(line))


class Checkpoint:
    """The state of one job on disk. Held by one process at a time, where the file system can say so."""

    def __init__(self, folder: Place, lock: int | None) -> None:
        self.folder, self._lock = folder, lock
        self.rows, self.totals = RowSet(), Totals()
        self.finished: dict[str, Any] | None = None
        self._parts: list[Part] = []
        self._run, self._written = secrets.token_hex(4), 0
        self._entries: list[Entry] = []
        self._since = 0.0

    @classmethod
    def open(cls, folder: Place, identity: Mapping[str, Any], *, restart: bool) -> Self:
        """Begin a job, or take it up. `identity` is what must be as it was, a field at a time, for the rows that are
        done to count; `restart` forgets them instead. Raises `ConfigError` for another job, or one that runs."""
        folder.make_folder()
        opened = cls(folder, _lock(folder))
        try:
            opened._read({"version": _VERSION, **identity}, restart)
        except BaseException:
            opened.close()
            raise
        return opened

    def _read(self, identity: dict[str, Any], restart: bool) -> None:
        described = self.folder.inside("job.json")
        if restart:
            for file in self.folder.files():
                if file.base_name != "lock":
                    self.folder.inside(file.base_name).remove()
        if not described.exists:
            described.write(json.dumps({"identity": identity}).encode())
        found = json.loads(described.read())
        # As JSON gives it back: tuples are lists there.
        for name, value in json.loads(json.dumps(identity)).items():
            if found["identity"].get(name) != value:
                raise ConfigError(
                    f"{self.folder} is of a job with another {name}: {found['identity'].get(name)}, now {value}; "
                    "give another output, or --restart to forget what that job has done"
                )
        self.identity, self.finished = found["identity"], found.get("finished")
        for file in self.folder.files():
            if file.base_name.startswith("part-") and file.base_name.endswith(".jsonl"):
                self._learn(self.folder.inside(file.base_name))

    def _learn(self, place: Place) -> None:
        with place.system.open_input_file(place.path) as file:
            head = json.loads(_first_line(file, str(place)))
        self._parts.append(Part(place, head["rows"][0], len(head["rows"])))
        new = [row for row in head["rows"] if row not in self.rows]
        for row in new:
            self.rows.add(row)
        if len(new) == len(head["rows"]):
            self.totals.add(Totals(**head["totals"]))
        else:  # of two runs at once
            for entry in self._parts[-1].entries():
                if entry.row in new:
                    self.totals.add(Totals.of(entry))

    def describe(self, **more: Any) -> None:
        """Add to what the job is, or say that it is over."""
        document = {"identity": self.identity, "finished": self.finished, **more}
        self.folder.inside("job.json").write(json.dumps(document).encode())

    def require(self, name: str, value: str) -> None:
        """What the job has found out about itself must be so when it is taken up. Raises `ConfigError`."""
        known = self.identity.setdefault(name, value)
        if known != value:
            raise ConfigError(
                f"the job began with {name} {known}, now it is {value}; "
                "give another output, or --restart to forget what is done"
            )
        self.describe()

    # ---- while it runs ----

    def add(self, entry: Entry) -> None:
        """A row is done; on disk after the next `flush`."""
        if not self._entries:
            self._since = time.monotonic()
        self._entries.append(entry)
        self.rows.add(entry.row)
        self.totals.add(Totals.of(entry))

    def is_due(self, seconds: float) -> bool:
        """Whether entries have waited so long, or there are enough for a part."""
        waited = time.monotonic() - self._since
        return bool(self._entries) and (len(self._entries) >= PART_ENTRIES or waited >= seconds)

    def flush(self) -> None:
        """Write what was added since the last time as one part."""
        entries, self._entries = self._entries, []
        if not entries:
            return
        entries.sort(key=lambda entry: entry.row)
        totals = Totals()
        for entry in entries:
            totals.add(Totals.of(entry))
        head = {"rows": [entry.row for entry in entries], "totals": asdict(totals)}
        lines = [head, *(astuple(entry) for entry in entries)]
        place = self.folder.inside(f"part-{self._run}-{self._written:06d}.jsonl")
        self._written += 1
        place.write(b"".join(map(json_line, lines)))
        self._parts.append(Part(place, entries[0].row, len(entries)))

    # ---- when it is over ----

    def merged(self) -> Iterator[Entry]:
        """Every row once, by number. Parts are opened when the first of their rows is next, and rows begin in order, so
        that few are open at a time."""
        waiting = deque(sorted(self._parts, key=lambda part: part.first))
        opened: list[tuple[int, int, Entry, Iterator[Entry]]] = []  # the second tells entries of one row apart
        last = 0
        while waiting or opened:
            while waiting and (not opened or waiting[0].first <= opened[0][0]):
                _push(opened, len(waiting), waiting.popleft().entries())
            row, place, entry, rest = heappop(opened)
            if row != last:
                yield entry
            last = row
            _push(opened, place, rest)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The output is there: remember how it came out, and forget the parts."""
        self.finished = dict(summary)
        self.describe()
        for part in self._parts:
            part.place.remove()
        self._parts = []

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def json_line(value: object) -> bytes:
    """One line of JSON in UTF-8. Half of a surrogate pair, which UTF-8 cannot hold, is written as JSON's escape."""
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _push(opened: list[tuple[int, int, Entry, Iterator[Entry]]], place: int, entries: Iterator[Entry]) -> None:
    if (entry := next(entries, None)) is not None:
        heappush(opened, (entry.row, place, entry, entries))


def _first_line(file: Any, name: str) -> bytes:
    text = b""
    while b"\n" not in text:
        piece = file.read(1 << 16)
        if not piece:
            raise RayMoEError(f"{name} is no part of a job; remove it")
        text += piece
    return text.split(b"\n", 1)[0]


def _lock(folder: Place) -> int | None:
    """Held until the process ends, however it ends. Object stores have no locks."""
    if not folder.is_local:
        return None
    lock = os.open(Path(folder.path, "lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError(f"{folder}: another process runs this job") from error
    return lock
