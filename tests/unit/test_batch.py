"""Batch jobs without a cluster: what rows ask for, how answers read, and that a job killed anywhere loses no row."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from ray_moe.batch.checkpoint import Checkpoint, Entry, Ids, RowSet, json_line
from ray_moe.batch.places import Place
from ray_moe.batch.reading import Input, LineDatasource
from ray_moe.batch.rows import Ask, Defaults, answered, ask_of, columns, fields_of, id_of, refused
from ray_moe.batch.writing import SCHEMA, form_of, write_output
from ray_moe.errors import ConfigError, DeadlineError, RayMoEError, RequestError
from ray_moe.serve.schema import ChatRequest, CompletionRequest
from tests.layers import untimed

DEFAULTS = Defaults("m", {"max_tokens": 9}, seed=0)
CHAT = {"messages": [{"role": "user", "content": "Who goes there?"}]}


def ask(fields: dict[str, Any], defaults: Defaults = DEFAULTS, number: int = 3) -> Ask:
    return ask_of(fields, number, id_of(fields, number), defaults)


# -- Rows


def test_a_prompt_is_a_completion_and_messages_are_a_chat() -> None:
    completion, chat = ask({"id": "a", "prompt": "To be"}), ask(CHAT)
    assert isinstance(completion.body, CompletionRequest) and completion.body.prompt == ["To be"]
    assert isinstance(chat.body, ChatRequest) and chat.body.messages[0].content == "Who goes there?"
    assert (completion.custom_id, chat.custom_id) == ("a", "row-3")
    assert not completion.in_openai_format


@pytest.mark.parametrize("body", [CHAT, json.dumps(CHAT)], ids=["object", "text of a column"])
def test_a_row_in_openais_batch_format_is_its_body(body: object) -> None:
    row = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    asked = ask(row)
    assert isinstance(asked.body, ChatRequest)
    assert (asked.custom_id, asked.in_openai_format) == ("c", True)


def test_defaults_are_for_rows_that_do_not_say() -> None:
    assert ask({"prompt": "x"}).body.max_tokens == 9
    assert ask({"prompt": "x", "max_tokens": 4}).body.max_tokens == 4
    assert ask({"prompt": "x"}).body.model == "m"
    assert ask({"prompt": "x", "model": "n"}).body.model == "n"


def test_a_row_that_draws_has_a_seed_that_follows_from_its_id_and_the_jobs() -> None:
    def seed(custom_id: str, job: int, **fields: Any) -> int | None:
        return ask({"id": custom_id, "prompt": "x", **fields}, Defaults("m", {}, job)).body.seed

    assert seed("a", 0) == seed("a", 0)
    assert len({seed("a", 0), seed("b", 0), seed("a", 1)}) == 3
    assert seed("a", 0, seed=7) == 7
    assert all(0 <= (seed(str(i), 0) or 0) < 2**63 for i in range(100))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": "a"}, "either a prompt, or messages, or a body"),
        ({"prompt": "x", **CHAT}, "either a prompt, or messages, or a body"),
        ({"prompt": "x", "temperature": 9}, "temperature is 9; it must be less than or equal to 2"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0; it must be an integer >= 1"),
        ({"prompt": "x", "stream": True}, "stream is true; a batch answers when all is there"),
        ({"prompt": "x", "best_of": 2}, "best_of is 2"),
        ({"messages": []}, "messages is"),
        ({"id": True, "prompt": "x"}, "id is true; it must be a non-empty string"),
        ({"id": "", "prompt": "x"}, 'id is ""; it must be a non-empty string'),
        ({"id": "x" * 513, "prompt": "x"}, "id has 513 characters; the most is 512"),
        ({"id": "\ud800", "prompt": "x"}, "half a surrogate pair"),
        ({"body": CHAT, "url": "/v1/chat/completions"}, "custom_id is required"),
        ({"custom_id": "a", "body": CHAT, "url": "/v1/embeddings"}, "url is .*; it must be /v1/completions or"),
        ({"custom_id": "a", "body": CHAT, "method": "GET", "url": "/v1/completions"}, "method is .*; it must be POST"),
        ({"custom_id": "a", "body": [], "url": "/v1/completions"}, "body is .*; it must be a JSON object"),
        ({"custom_id": "a", "body": "{", "url": "/v1/completions"}, "body is not JSON"),
        ({"custom_id": None, "body": CHAT, "url": "/v1/completions"}, "custom_id is null"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_in_one_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ask(fields)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense\n", "the line is not JSON: Expecting value"),
        (b"[1]\n", r"the line is \[1\]; it must be a JSON object"),
        (b"\xff\xfe\n", "the line is not UTF-8"),
        (b'{"prompt": "x"\n', "the line is not JSON"),
        (b"[" * 100_000, "the line is not JSON"),
    ],
)
def test_a_line_that_is_no_object_is_refused(line: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        fields_of(line)


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_do_no_harm() -> None:
    assert fields_of(b"  \r\n") is None
    assert fields_of(b'\xef\xbb\xbf{"prompt": "x"}\r\n') == {"prompt": "x"}


def test_a_null_of_a_column_is_a_field_that_the_row_leaves_out() -> None:
    row = {"id": 7, "prompt": "x", "seed": None, "stream_options": {"include_usage": None}}
    fields = fields_of(row)
    assert fields == {"id": 7, "prompt": "x", "stream_options": {}}
    assert id_of(fields, 1) == "7"


# -- Answers


def document(*texts: str, chat: bool = False) -> dict[str, Any]:
    said = [{"message": {"role": "assistant", "content": text}} if chat else {"text": text} for text in texts]
    choices = [{"index": i, **one, "logprobs": None, "finish_reason": "stop"} for i, one in enumerate(said)]
    return {"id": "cmpl-1", "choices": choices, "usage": {"prompt_tokens": 2, "completion_tokens": 5}}


def test_an_answer_to_a_plain_row_is_flat_and_one_to_openais_is_openais() -> None:
    plain = answered(ask({"id": "a", "prompt": "x"}), document("y"))
    counts = {"finish_reason": "stop", "prompt_tokens": 2, "completion_tokens": 5}
    assert plain == {"id": "a", "text": "y", **counts}
    whole = document("y", chat=True)
    row = {"custom_id": "c", "url": "/v1/chat/completions", "body": CHAT}
    assert answered(ask(row), whole) == {
        "id": "batch_req_3",
        "custom_id": "c",
        "response": {"status_code": 200, "request_id": "cmpl-1", "body": whole},
        "error": None,
    }


@pytest.mark.parametrize("fields", [{"n": 3}, {"min_p": 0.1}, {"logprobs": 2}, {"logit_bias": {"7": -100}}])
def test_a_row_takes_what_http_takes(fields: dict[str, Any]) -> None:
    body = ask({"prompt": "x", **fields}).body
    assert {name: getattr(body, name) for name in fields} == fields


def test_several_choices_do_not_fit_into_one_text_and_are_all_there() -> None:
    two = document("y", "z")
    assert answered(ask({"prompt": "x"}), two)["choices"] == two["choices"]
    assert answered(ask({"prompt": "x"}), two)["text"] == "y"


def test_every_answer_has_the_columns_of_a_parquet_output() -> None:
    for one in (document("y"), document("y", "z"), document("y", chat=True)):
        row = columns(ask({"id": "a", "prompt": "x"}), one)
        assert list(row) == SCHEMA.names
        assert json.loads(row["response"]) == one


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RequestError("seed is x", "seed"), 400, "seed is x"),
        (DeadlineError("next token", 3), 504, "next token did not finish within 3 s"),
        (KeyError("x"), 500, "internal error"),
    ],
)
def test_an_error_line_says_what_http_would(error: Exception, status: int, message: str) -> None:
    line = refused(4, "a", error)
    assert (line["custom_id"], line["row"], line["response"]["status_code"]) == ("a", 4, status)
    assert message in line["error"]["message"]
    assert line["response"]["body"]["error"]["param"] == getattr(error, "param", None)


# -- The checkpoint

IDENTITY = {"input": [["a", 1, 2]], "seed": 0}


def folder(path: Path) -> Place:
    return Place.at(str(path / "out.jsonl.job"))


def entry(row: int, ok: bool = True) -> Entry:
    return Entry(row, ok, {"id": f"r{row}"}, 1, 2)


@untimed
@given(st.permutations(range(1, 25)), st.lists(st.sampled_from(["flush", "kill"]), max_size=12), st.randoms())
def test_every_row_comes_out_once_and_in_order_whenever_the_job_is_killed(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], events: list[str], random: Any
) -> None:
    place = folder(tmp_path_factory.mktemp("job"))
    opened = Checkpoint.open(place, IDENTITY, restart=False)
    left = list(order)
    cuts = sorted(random.choices(range(len(order) + 1), k=len(events)))
    for at, event in zip(cuts, events, strict=True):
        while left and len(order) - len(left) < at:
            opened.add(entry(left.pop(0), ok=random.random() < 0.8))
        if event == "flush":
            opened.flush()
            continue
        opened.close()  # what was added since the last flush is gone
        opened = Checkpoint.open(place, IDENTITY, restart=False)
        left = [row for row in order if row not in opened.rows]
    for row in left:
        opened.add(entry(row))
    opened.flush()
    assert [one.row for one in opened.merged()] == sorted(order)
    assert opened.totals.done == len(order)
    assert opened.totals.errors == sum(not one.ok for one in opened.merged())
    opened.close()


def test_a_row_that_two_runs_answered_comes_out_once(tmp_path: Path) -> None:
    here, there = folder(tmp_path / "a"), folder(tmp_path / "b")
    for place in (here, there):
        one = Checkpoint.open(place, IDENTITY, restart=False)
        for row in (1, 2, 3) if place is here else (2, 3, 4):
            one.add(entry(row))
        one.flush()
        one.close()
    for file in there.files():  # as on a store without locks
        if file.base_name.startswith("part-"):
            Path(file.path).rename(Path(here.path, file.base_name))
    both = Checkpoint.open(here, IDENTITY, restart=False)
    assert [one.row for one in both.merged()] == [1, 2, 3, 4]
    assert (both.totals.done, both.totals.completion_tokens) == (4, 8)
    both.close()


def test_another_job_is_refused_by_what_differs_and_restart_forgets_it(tmp_path: Path) -> None:
    opened = Checkpoint.open(folder(tmp_path), IDENTITY, restart=False)
    opened.add(entry(1))
    opened.flush()
    opened.close()
    with pytest.raises(ConfigError, match=r"another seed: 0, now 1; give another output, or --restart"):
        Checkpoint.open(folder(tmp_path), {**IDENTITY, "seed": 1}, restart=False)
    again = Checkpoint.open(folder(tmp_path), {**IDENTITY, "seed": 1}, restart=True)
    assert 1 not in again.rows and again.totals.done == 0
    again.close()


def test_a_model_that_changes_between_two_runs_is_refused(tmp_path: Path) -> None:
    opened = Checkpoint.open(folder(tmp_path), IDENTITY, restart=False)
    opened.require("checkpoint_version", "c1")
    opened.close()
    again = Checkpoint.open(folder(tmp_path), IDENTITY, restart=False)
    again.require("checkpoint_version", "c1")
    with pytest.raises(ConfigError, match="began with checkpoint_version c1, now it is c2"):
        again.require("checkpoint_version", "c2")
    again.close()


def test_a_job_that_is_over_says_so_and_has_no_parts_left(tmp_path: Path) -> None:
    opened = Checkpoint.open(folder(tmp_path), IDENTITY, restart=False)
    opened.add(entry(1))
    opened.flush()
    opened.finish({"rows": 1})
    opened.close()
    again = Checkpoint.open(folder(tmp_path), IDENTITY, restart=False)
    assert again.finished == {"rows": 1}
    assert [file.base_name for file in folder(tmp_path).files()] == ["job.json", "lock"]
    again.close()


def test_two_processes_cannot_run_one_job_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom ray_moe.batch.checkpoint import Checkpoint\nfrom ray_moe.batch.places import Place\n"
        f"Checkpoint.open(Place.at({folder(tmp_path).path!r}), {{'seed': 0}}, restart=False)\n"
        "print('open', flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match="another process runs this job"):
            Checkpoint.open(folder(tmp_path), {"seed": 0}, restart=False)
        other.kill()
    Checkpoint.open(folder(tmp_path), {"seed": 0}, restart=False).close()


def test_a_part_that_lost_its_end_is_named(tmp_path: Path) -> None:
    opened = Checkpoint.open(folder(tmp_path), IDENTITY, restart=False)
    opened.add(entry(1))
    opened.add(entry(2))
    opened.flush()
    (part,) = (file.path for file in folder(tmp_path).files() if "part-" in file.path)
    Path(part).write_bytes(b"".join(Path(part).read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(RayMoEError, match=r"part-.* has 1 of 2 answers; remove it"):
        list(opened.merged())
    opened.close()


@untimed
@given(st.lists(st.integers(1, 300)), st.integers(1, 300))
def test_a_row_set_is_a_set(rows: list[int], asked: int) -> None:
    kept = RowSet()
    for row in rows:
        kept.add(row)
    assert (asked in kept) == (asked in rows)


def test_ids_remember_who_had_them_first() -> None:
    ids = Ids()
    assert [ids.first_row(name, row) for row, name in enumerate(["a", "b", "a", "A", ""], 1)] == [1, 2, 1, 4, 5]
    ids.close()


def test_half_a_surrogate_pair_is_written_as_json_escapes_it() -> None:
    assert json.loads(json_line({"text": "a\ud83d é"})) == {"text": "a\ud83d é"}


# -- Files


def systems(tmp_path: Path) -> Iterator[Place]:
    yield Place.at(str(tmp_path / "x"))
    # How a store that is not this machine's disk is treated.
    yield Place(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "y")


def test_places_are_written_read_listed_and_removed_on_any_file_system(tmp_path: Path) -> None:
    for place in systems(tmp_path):
        assert not place.exists
        place.make_folder()
        place.inside("b").write(b"2")
        place.inside("a").write(b"1")
        place.inside("a").write(b"3")
        assert [(file.base_name, file.size) for file in place.files()] == [("a", 1), ("b", 1)]
        assert place.inside("a").read() == b"3"
        place.inside("c").remove()
        place.remove()
        assert not place.exists


def test_a_file_that_is_being_replaced_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    place = Place.at(str(tmp_path / "out"))
    place.write(b"old")

    def write_half() -> None:
        with place.replacing() as sink:
            sink.write(b"new")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_half()
    assert place.read() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_address_of_no_file_system_is_refused() -> None:
    with pytest.raises(ConfigError, match="nosuch://x cannot be used"):
        Place.at("nosuch://x")


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_the_output_is_in_order_and_errors_have_a_file_of_their_own(tmp_path: Path, name: str) -> None:
    form = form_of(name)
    out, errors = Place.at(str(tmp_path / name)), Place.at(str(tmp_path / "errors"))
    asked = ask({"id": "a", "prompt": "x"})
    entries = [Entry(1, True, form.document(asked, document("y"))), Entry(2, False, refused(2, "b", KeyError("x")))]
    write_output(entries, form, out, errors)
    rows = (
        [json.loads(line) for line in out.read().splitlines()]
        if name.endswith("jsonl")
        else pq.read_table(out.path).to_pylist()
    )
    assert [(row["id"], row["text"]) for row in rows] == [("a", "y")]
    assert [json.loads(line)["custom_id"] for line in errors.read().splitlines()] == ["b"]
    write_output(entries[:1], form, out, errors)
    assert not errors.exists, "the errors of an earlier job would be taken for this one's"


def test_an_output_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"output 'out.csv' must end in .jsonl or .parquet"):
        form_of("out.csv")


# -- Reading


@untimed
@given(st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=9), st.booleans())
def test_lines_arrive_as_they_are(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ended: bool) -> None:
    path = tmp_path_factory.mktemp("in") / "in.jsonl.gz"
    content = b"\n".join(lines) + (b"\n" if ended else b"")
    path.write_bytes(gzip.compress(content))
    (task,) = LineDatasource(fs.LocalFileSystem(), [str(path)]).get_read_tasks(1)
    read = [line for block in task() for line in block.column("line").to_pylist()]
    assert b"".join(read) == content
    assert all(line.count(b"\n") <= 1 and not line[:-1].count(b"\n") for line in read)


def test_a_long_file_comes_in_blocks_of_a_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes((b"x" * 999 + b"\n") * 5000)
    (task,) = LineDatasource(fs.LocalFileSystem(), [str(path)]).get_read_tasks(1)
    blocks = list(task())
    assert sum(map(len, blocks)) == 5000
    assert max(block.nbytes for block in blocks) < 2 << 20


def test_a_folder_is_read_by_name_and_two_formats_at_once_are_refused(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_text("{}\n")
    found = Input.at(str(tmp_path))
    assert [Path(file.path).name for file in found.files] == ["a.jsonl", "b.jsonl"]
    assert (found.bytes, found.is_parquet) == (6, False)
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(ConfigError, match="holds JSON lines and Parquet; give one format at a time"):
        Input.at(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"), [("no.jsonl", "does not exist"), ("in.csv", "no file whose name ends in")]
)
def test_an_input_that_is_none_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "in.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match=message):
        Input.at(str(tmp_path / name))
