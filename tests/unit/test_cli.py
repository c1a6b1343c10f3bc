"""The command line without Ray: what it accepts, how it refuses, what it remembers, what status looks like."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import psutil
import pytest
from rich.console import Console

from ray_moe.actors.reports import ClusterStatus, SlotRow
from ray_moe.asked import ReplicaRequest
from ray_moe.cli import demo, records
from ray_moe.cli.connection import locate, running_ray
from ray_moe.cli.generate import ranks_document
from ray_moe.cli.head import MARK, end_head, environment_of, free_ports, processes_of
from ray_moe.cli.lifecycle import status_document
from ray_moe.cli.main import run
from ray_moe.cli.options import cluster_config
from ray_moe.cli.output import Output, output
from ray_moe.cli.records import Head, Record
from ray_moe.controlplane.generations import GenerationStatus, State
from ray_moe.engine.records import EngineStatus
from ray_moe.errors import ConfigError, NotServingError, RayMoEError
from ray_moe.observe.status import render_status

VERBS = ("up", "down", "status", "generate", "demo")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing was ever started from here, and no Ray has noted its address."""
    monkeypatch.setenv("RAY_MOE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path / "home"


# ---- what it accepts ----


def test_help_loads_none_of_the_large_libraries() -> None:
    program = (
        "import sys\nfrom ray_moe.cli.main import run\n"
        "code = run(['--help'])\n"
        "print(code, sorted({'torch', 'ray', 'transformers', 'pydantic'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr == "0 []\n"
    assert all(verb in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_json_and_address(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--json" in shown
    assert "--address" in shown


def test_options_go_before_the_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text('model: tiny-moe\npeers: 3\nreplicas: "0:1=2"\nkv_blocks: 64\n')
    config = cluster_config(file, peers=2, replicas="*:3=2,1:0=2", spare_slots=None)
    assert (config.peers, config.kv_blocks, config.spare_slots) == (2, 64, 0)
    assert config.replicas == (
        ReplicaRequest(layer="*", expert=3, count=2),
        ReplicaRequest(layer=1, expert=0, count=2),
    )


def test_a_model_is_the_embedded_ones_name_a_folder_by_its_full_path_or_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    found = [cluster_config(None, model=model).model for model in ("tiny-moe", "mine", "./mine", "org/model")]
    assert found == ["tiny-moe", str(tmp_path / "mine"), str(tmp_path / "mine"), "org/model"]


# ---- how it refuses ----

BAD_INPUT = [
    ([], r"Missing command"),
    (["fly"], r"No such command 'fly'"),
    (["up", "--peers", "two"], r"Invalid value for '--peers'"),
    (["status", "--wide"], r"No such option.*--wide"),
    (["up"], r"model: required, but not given"),
    (["up", "--model", "/nowhere/at/all"], r"model '/nowhere/at/all' is not a folder"),
    (["up", "--model", "/"], r"/ is not a model folder: it has no config\.json"),
    (["up", "--config", "/nowhere.yaml"], r"/nowhere\.yaml: cannot be read"),
    (["up", "--model", "tiny-moe", "--peers", "0"], r"peers: found 0, input should be greater than or equal to 1"),
    (["up", "--model", "tiny-moe", "--dtype", "int8"], r"dtype: found 'int8', .*'float32'"),
    (["up", "--model", "tiny-moe", "--port", "70000"], r"port: found 70000, .*65535"),
    (["up", "--model", "tiny-moe", "--replicas", "0-3"], r"'0-3' is not LAYER:EXPERT=COUNT"),
    (["up", "--model", "tiny-moe", "--replicas", "0:3=0"], r"count: found 0"),
    (["up", "--model", "tiny-moe", "--name", "a/b"], r"name: found 'a/b'"),
    (["status", "--name", "a/b"], r"name is 'a/b'"),
    (["status", "--address", "somewhere"], r"address is 'somewhere'; it must be HOST:PORT"),
    (["generate", "--model", "tiny-moe"], r"give either --prompt or --prompt-token-ids"),
    (["generate", "--prompt", "a", "--prompt-token-ids", "1"], r"give either --prompt or --prompt-token-ids"),
    (["generate", "--model", "tiny-moe", "--prompt-token-ids", "1,x"], r"prompt-token-ids is '1,x'"),
    (["generate", "--prompt", "a", "--address", "auto", "--peers", "2"], r"peers: a running cluster .* has its own"),
    (["generate", "--model", "tiny-moe", "--prompt", "a", "--temperature", "-1"], r"temperature is -1\.0; .*>= 0"),
    (["generate", "--model", "tiny-moe", "--prompt", "a", "--max-tokens", "0"], r"max_tokens is 0; .*>= 1"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=lambda case: " ".join(case)[:50] or "nothing")
def test_bad_input_is_one_line_on_stderr_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(rf"error: .*{message}.*\n", shown.err), shown.err


def test_with_json_an_error_is_one_document_on_stdout_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--model", "tiny-moe", "--prompt", "a", "--top-p", "0", "--json"]) == 2
    shown = capsys.readouterr()
    message = "top_p is 0.0; it must be a number in (0, 1]"
    assert json.loads(shown.out) == {
        "error": {"type": "RequestError", "message": message, "exit_code": 2, "param": "top_p"}
    }
    assert shown.err == f"error: {message}\n"
    assert run(["status", "--wide", "--json"]) == 2
    usage = json.loads(capsys.readouterr().out)["error"]
    assert (usage["type"], usage["exit_code"]) == ("UsageError", 2)


@pytest.mark.parametrize("verb", [["status"], ["down"], ["generate", "--prompt", "a", "--address", "auto"]])
def test_where_nothing_runs_that_is_said_with_exit_1(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*verb, "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]["type"] == "NotServingError"
    assert shown.err == "error: no cluster named 'default' was started from here, and no Ray to attach to was found\n"


def test_an_address_where_nothing_listens_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert run(["status", "--address", f"127.0.0.2:{port}"]) == 1
    assert capsys.readouterr().err == f"error: no Ray answers at 127.0.0.2:{port}\n"


def test_a_port_that_is_taken_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["up", "--model", "tiny-moe", "--port", str(port)]) == 2
    assert capsys.readouterr().err == f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_an_address_that_others_reach_without_a_key_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["up", "--model", "tiny-moe", "--host", "0.0.0.0"]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("error: host is 0.0.0.0, which others can reach, and there is no API key")
    assert "--api-keys-file" in refused and "--no-auth" in refused


# ---- what it prints ----


def test_stdout_belongs_to_the_answer_whatever_else_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with output(as_json=True) as out:
        sys.stdout.write("a note of Ray's\n")
        out.say("starting")
        out.text("for people")
        out.result({"answer": 42})
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"answer": 42}
    assert shown.err == "starting\nfor people"
    with output(as_json=False) as out:
        sys.stdout.write("a note of Ray's\n")
        out.text("for people\n")
        out.show("a line")
        out.result({"answer": 42})
    assert capsys.readouterr().out == "for people\na line\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_and_nowhere_else() -> None:
    stdout, terminal, pipe = io.StringIO(), Terminal(), io.StringIO()
    with Output(False, stdout, terminal).loading() as draw:
        assert draw is not None
        draw({0: _progress("trunk", 0, 1), 1: _progress("experts", 3, 16)})
    assert "rank 1" in terminal.getvalue()
    assert "experts" in terminal.getvalue()
    with Output(False, stdout, pipe).loading() as draw:
        assert draw is None
    assert stdout.getvalue() == pipe.getvalue() == ""


def _progress(phase: str, done: int, total: int) -> object:
    from ray_moe.cluster import LoadProgress

    return LoadProgress(phase, done, total)


# ---- what it remembers ----


def test_a_record_comes_back_as_it_was_and_only_its_owner_can_read_it(home: Path) -> None:
    record = Record("mine", "127.0.0.1:1", "m", loopback=True, token_file="/t", head=Head(1, 2.5, "/l"), http_url="u")
    path = records.save(record)
    assert records.load("mine") == record
    assert records.at("127.0.0.1:1") == record
    assert (records.load("other"), records.at("127.0.0.1:2")) == (None, None)
    assert [stat.S_IMODE(file.stat().st_mode) for file in (path, home)] == [0o600, 0o700]
    records.remove("mine")
    assert list(records.every()) == []


@pytest.mark.parametrize("text", ["", "[]", '{"name": "mine"}', '{"name": "a", "address": "b", "model": "c", "x": 1}'])
def test_a_damaged_record_is_named(home: Path, text: str) -> None:
    home.mkdir()
    (home / "mine.json").write_text(text)
    with pytest.raises(RayMoEError, match=r"mine\.json is not a cluster's record"):
        records.load("mine")


def test_a_cluster_is_found_by_its_record_with_what_its_ray_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record("mine", "127.0.0.1:1", "m", loopback=True, token_file="/t")
    records.save(record)
    wanted = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/t"}
    assert environment_of(record) == wanted
    for target in (locate(None, "mine"), locate("auto", "mine"), locate("127.0.0.1:1", "whatever")):
        assert (target.address, target.environment) == ("127.0.0.1:1", wanted)
    assert locate("10.0.0.1:6379", "mine").address == "10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert locate("auto", "unknown").address == "10.0.0.2:6379"


def test_a_ray_is_found_by_its_note_only_while_it_answers(tmp_path: Path) -> None:
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    with socket.create_server(("127.0.0.2", 0)) as listening:
        address = f"127.0.0.2:{listening.getsockname()[1]}"
        note.write_text(address)
        found = running_ray()
        assert found is not None
        assert found.address == address
    assert running_ray() is None


@pytest.fixture
def session(home: Path) -> Iterator[Record]:
    """A session of two processes; the second one outlives the end of the first."""
    program = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    leader = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    leader.stdout.readline()
    head = Head(leader.pid, psutil.Process(leader.pid).create_time(), str(home / "mine.log"))
    record = Record("mine", "a:1", "m", head=head)
    records.save(record)
    yield record
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.communicate(timeout=30)


def test_ending_a_head_ends_its_whole_session_and_forgets_it(session: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_moe.cli.head._TERMINATE_S", 0.5)
    assert session.head is not None
    members = processes_of(session.head)
    assert len(members) == 2
    end_head(session)
    assert [process for process in members if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    assert records.load("mine") is None


def test_a_process_that_only_inherited_the_pid_is_left_alone(session: Record) -> None:
    assert session.head is not None
    members = processes_of(session.head)
    end_head(Record("mine", "a:1", "m", head=Head(session.head.pid, session.head.created - 60, session.head.log)))
    assert len(members) == 2
    assert processes_of(session.head) == members


def test_a_process_that_has_left_the_session_is_ended_by_its_mark_suspended_or_not(
    session: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_moe.cli.head._TERMINATE_S", 0.5)
    assert session.head is not None
    joining, strange = (
        subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: mark}, start_new_session=True)
        for mark in ("ours", "another")
    )
    try:
        joining.send_signal(signal.SIGSTOP)
        head = replace(session.head, mark="ours")
        assert joining.pid in {process.pid for process in processes_of(head)}
        end_head(replace(session, head=head))
        assert joining.wait(timeout=10) == -signal.SIGKILL
        assert strange.poll() is None
    finally:
        for process in (joining, strange):
            process.kill()
            process.wait(timeout=10)


# ---- settings ----


def test_spare_slots_are_a_number_or_as_many_as_fit(capsys: pytest.CaptureFixture[str]) -> None:
    for text, expected in (("3", 3), ("auto", "auto")):
        assert cluster_config(None, model="tiny-moe", spare_slots=text).spare_slots == expected
    for text in ("many", "-1"):
        assert run(["up", "--model", "tiny-moe", f"--spare-slots={text}"]) == 2
        assert f"found '{text}', must be \"auto\" or a whole number" in capsys.readouterr().err


def test_any_field_of_the_configuration_can_be_set_and_options_go_before_it() -> None:
    settings = ["transport=hierarchical", "node_labels=a, b", "decode_buckets=4x8", "peers=3", "replicas=*:3=2"]
    config = cluster_config(None, settings, model="tiny-moe", peers=2)
    assert (config.transport, config.node_labels, config.peers) == ("hierarchical", ("a", "b"), 2)
    assert [(bucket.rank_tokens, bucket.slot_rows) for bucket in config.decode_buckets] == [(4, 8)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["transport"], "--set takes FIELD=VALUE, for example transport=hierarchical; found 'transport'"),
        (["=1"], "found '=1'"),
        (["peers=1", "peers=2"], "--set gives peers twice"),
        (["transprt=hierarchical"], "transprt"),
        (["transport=pigeon"], "transport"),
        (["node_labels=[a]"], "node_labels must name the node of each of 4 peers, found 1"),
        (["replicas=1:2"], "replicas: '1:2' is not LAYER:EXPERT=COUNT"),
        (["decode_buckets=0x1"], "decode_buckets '0x1': rank_tokens"),
        (["decode_buckets=4"], "decode_buckets: .* is not RANK_TOKENSxSLOT_ROWS"),
        (["contract=dropless", "runner=grouped"], "contract 'dropless' sets runner to 'block_sparse', found 'grouped'"),
        (["contract=steam"], "contract"),
        (["peers={"], "--set peers: not valid YAML"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_naming_it(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster_config(None, settings, model="tiny-moe")


# ---- status ----

STATUS = ClusterStatus(
    name="mine",
    state="degraded",
    model="/models/some",
    release_id="mine-0123456789ab",
    generation=2,
    epoch=0,
    group="tcp",
    transport="all_to_all_v",
    runner="grouped",
    strategy="bulk",
    payload="fp8_row",
    gate_location="origin",
    contract="low_latency",
    backends={"prefill": "tcp+all_to_all_v+grouped+bulk", "decode": "tcp+padded_all_to_all+masked_decode[8x32]"},
    policy="token_hash",
    peers=(
        EngineStatus(
            rank=0,
            state="serving",
            failure="",
            generation=2,
            epoch=0,
            committed_step=39,
            steps_agreed=40,
            steps_worked=31,
            seconds_worked=1.5,
            seconds_agreeing=0.5,
            slow_step_seconds=0.1,
            waiting=4,
            running=7,
            outstanding_tokens=120,
            tokens_emitted=99,
            kv_blocks_used=12,
            kv_blocks_total=512,
            rows_local=1001,
            rows_sent=1002,
            rows_received=1003,
            audited=1,
            bytes_sent=4_008,
            bytes_received=4_012_000,
            replays=30,
            fallbacks={"rank_token_capacity_exceeded": 2, "expert_route_capacity_exceeded": 1},
            peak_live_bytes=904,
            fan_out={"tokens": 8, "ranks": 14, "nodes": 10},
            resident_slots={1: 4, 0: 3},
        ),
    ),
    lost=(1,),
    generations=(
        GenerationStatus(1, "placement-v1", State.DRAINING, 1, ("rank-1",), True, 41),
        GenerationStatus(2, "placement-v2", State.ACTIVE, 2, ("rank-1", "rank-0"), False, None),
    ),
    slots=(
        *(SlotRow(0, f"slot-0-{expert}", expert, "primary", 0, expert) for expert in (0, 1, 2, 3, 5)),
        SlotRow(0, "slot-1-0", 3, "replica-1", 1, 0),
        SlotRow(0, "slot-1-1", 4, "primary", 1, 1),
    ),
)


def _drawn(document: dict) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render_status(document))
    return console.file.getvalue()  # type: ignore[attr-defined]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]


def test_status_shows_peers_requests_slots_replicas_generations_and_holders() -> None:
    lines = _drawn(status_document(STATUS)).splitlines()
    rows = [_cells(line) for line in lines if line.startswith("│")]
    assert lines[0].split() == ["mine", "is", "degraded", "/models/some"]
    assert lines[1:4] == [
        "release mine-0123456789ab, generation 2, epoch 0, replicas by token_hash, payload fp8_row, gate at origin, "
        "contract low_latency",
        "prefill: tcp+all_to_all_v+grouped+bulk",
        "decode: tcp+padded_all_to_all+masked_decode[8x32]",
    ]
    assert rows[0] == ["0", "serving", "2", "7", "4", "99", "12/512", "31/40"]
    assert rows[1][:2] == ["1", "lost"]
    exchange, rest = rows[2], rows[3:]
    assert exchange[:8] == ["0", "1001", "1002", "1003", "4.0 kB", "4.0 MB", "904 bytes", "30"]
    assert exchange[8:] == ["expert_route_capacity_exceeded 1, rank_token_capacity_exceeded 2", "1.75, 1.25"]
    rows = [*rows[:2], *rest]
    assert rows[2] == ["0", "0-2 3x2 5", "3x2 4", "1"]
    assert rows[3] == ["1", "placement-v1", "DRAINING", "1", "rank-1", "41"]
    assert rows[4] == ["2", "placement-v2", "ACTIVE", "2", "rank-0, rank-1", ""]


def test_a_status_that_went_through_json_looks_the_same() -> None:
    document = status_document(STATUS)
    again = json.loads(json.dumps(document))
    assert _drawn(again) == _drawn(document)
    assert again["generations"][0]["state"] == "DRAINING"
    assert again["peers"][0]["resident_slots"] == {"1": 4, "0": 3}
    assert again.keys() == asdict(STATUS).keys()


def test_ranks_hold_the_layers_own_counters() -> None:
    assert ranks_document(STATUS) == [
        {
            "rank": 0,
            "resident_slots": {"0": 3, "1": 4},
            "rows_sent": 2005,
            "rows_received": 2005,
            "rows_dispatched": 1002,
            "rows_computed": 1003,
            "rows_local": 1001,
            "steps_agreed": 40,
            "trunk_has_experts": False,
        }
    ]


# ---- demo ----


def _events(*data: str) -> httpx.Response:
    return httpx.Response(200, text="".join(f"data: {line}\n\n" for line in data))


def test_a_chat_stream_is_read_to_its_end_and_no_further_than_an_error() -> None:
    role, text, stop = (
        json.dumps({"choices": [{"delta": delta, "finish_reason": None}]})
        for delta in ({"role": "assistant", "content": ""}, {"content": "I am"}, {})
    )
    assert "".join(demo._pieces(_events(role, text, stop, "[DONE]"))) == "I am"
    with pytest.raises(NotServingError, match="rank 1 died"):
        list(demo._pieces(_events(role, json.dumps({"error": {"message": "rank 1 died"}}))))
    with pytest.raises(NotServingError, match=r"without \[DONE\]"):
        list(demo._pieces(_events(role, text)))


def test_the_demos_reference_is_what_transformers_generates(family_dir: Callable[..., Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = family_dir("qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
    prompt = [5, 17, 99, 3]
    whole = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
    assert demo.reference_tokens(path, prompt, 12) == tuple(whole[0, len(prompt) :].tolist())


def test_a_model_that_is_no_folder_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        cluster_config(None, model="./no-such-folder")
