"""Batch jobs on a real cluster: the answers of the SDK, every id once, an engine that is kept full.

The oracle is the SDK on the same cluster: a batch may word an answer, but not change it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_moe import cluster as clusters
from ray_moe.batch.driver import Progress
from ray_moe.batch.hosts import Standing
from ray_moe.batch.job import BatchJob, Summary, run
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.engine.sampling import SamplingParams
from ray_moe.errors import ConfigError, DeadlineError
from ray_moe.models import tiny_moe_path
from ray_moe.sdk import Client
from ray_moe.text import load_tokenizer, render_chat

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TOKENIZER = load_tokenizer(tiny_moe_path())
ROWS_AT_A_TIME = 8
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(local_ray: None) -> Iterator[Cluster]:
    config = ClusterConfig(
        name="batches", model=str(tiny_moe_path()), peers=2, kv_blocks=128, max_decode_rows=ROWS_AT_A_TIME
    )
    running = clusters.start(config)
    yield running
    running.stop()


def answers(cluster: Cluster, prompts: Sequence[Sequence[int]], **params: Any) -> list[str]:
    """The oracle: text as the tokenizer gives it."""

    async def all_of_them() -> list[str]:
        client = Client(cluster.directory())
        made = await asyncio.gather(*(client.generate(prompt, SamplingParams(**params)) for prompt in prompts))
        return [str(TOKENIZER.decode(list(one.token_ids), skip_special_tokens=True)) for one in made]

    return asyncio.run(all_of_them())


def write(path: Path, rows: Sequence[dict[str, Any] | str]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def batch(source: str, output: Path, **options: Any) -> Summary:
    return run(BatchJob(source, str(output), **options), Standing("batches"))


def test_answers_are_the_engines_in_the_order_of_the_input_and_what_is_wrong_is_told_apart(
    cluster: Cluster, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "Who goes there?"}]
    chat = {"url": "/v1/chat/completions", "body": {"model": "tiny-moe", "messages": messages, **GREEDY}}
    expected = answers(
        cluster,
        [TOKENIZER.encode("To be, or not to be"), render_chat(TOKENIZER, messages), TOKENIZER.encode("Enter Hamlet")],
        **GREEDY,
    )
    stop = expected[0][4:6]
    source = write(
        tmp_path / "in.jsonl",
        [
            {"id": "plain", "prompt": "To be, or not to be", **GREEDY},
            {"custom_id": "chat", "method": "POST", **chat},
            "no json",
            "",
            {"id": "plain", "prompt": "again"},
            {"prompt": TOKENIZER.encode("Enter Hamlet"), **GREEDY},
            {"id": "long", "prompt": "x", "max_tokens": 10**6},
            {"id": "other", "prompt": "x", "model": "gpt-9"},
            {"id": "stop", "prompt": "To be, or not to be", "stop": stop, **GREEDY},
        ],
    )
    summary = batch(source, tmp_path / "out.jsonl")
    plain, chatted, numbered, stopped = read(summary.output)
    assert (plain["id"], plain["text"], plain["completion_tokens"]) == ("plain", expected[0], 12)
    assert chatted["custom_id"] == "chat"
    body = chatted["response"]["body"]
    assert (body["choices"][0]["message"]["content"], body["usage"]["completion_tokens"]) == (expected[1], 12)
    assert (numbered["id"], numbered["text"]) == ("row-6", expected[2])
    assert (stopped["text"], stopped["finish_reason"]) == (expected[0].partition(stop)[0], "stop")
    assert summary.errors is not None
    wrong = {line["row"]: line for line in read(summary.errors)}
    assert {row: line["custom_id"] for row, line in wrong.items()} == {3: None, 5: "plain", 7: "long", 8: "other"}
    assert "is that of row 1 already" in wrong[5]["error"]["message"]
    assert wrong[7]["response"]["body"]["error"]["param"] == "max_tokens"
    assert (wrong[8]["response"]["status_code"], wrong[8]["error"]["code"]) == (404, "model_not_found")
    assert (summary.rows, summary.answered, summary.failed) == (8, 4, 4)


def test_parquet_goes_in_and_comes_out_with_the_answers_of_the_same_rows_as_lines(
    cluster: Cluster, tmp_path: Path
) -> None:
    rows = [{"id": str(i), "prompt": f"Scene {i}", "temperature": 0.9, "max_tokens": 6} for i in range(12)]
    (tmp_path / "in").mkdir()
    table = pa.Table.from_pylist([{**row, "seed": 5 if row["id"] == "3" else None} for row in rows])
    pq.write_table(table.slice(0, 7), tmp_path / "in" / "a.parquet", row_group_size=2)
    pq.write_table(table.slice(7), tmp_path / "in" / "b.parquet")
    rows[3]["seed"] = 5
    lines = batch(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", seed=3)
    columns = batch(str(tmp_path / "in"), tmp_path / "out.parquet", seed=3)
    made = pq.read_table(columns.output).to_pylist()
    assert [(row["id"], row["text"]) for row in made] == [(row["id"], row["text"]) for row in read(lines.output)]
    assert json.loads(made[0]["response"])["object"] == "text_completion"
    assert len({row["text"] for row in made}) > 6, "rows that draw have different seeds"


def test_the_engine_is_kept_full(cluster: Cluster, tmp_path: Path) -> None:
    """Every step of a peer emits one token per running request, so tokens per step say how many ran."""
    prompt = TOKENIZER.encode("To be, or not to be")
    rows = [{"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True} for _ in range(160)]
    seen: list[Progress] = []
    before = cluster.status().peers
    job = BatchJob(write(tmp_path / "in.jsonl", rows), str(tmp_path / "out.jsonl"))
    summary = run(job, Standing("batches"), seen.append)
    after = cluster.status().peers
    for old, new in zip(before, after, strict=True):
        running = (new.tokens_emitted - old.tokens_emitted) / (new.steps_worked - old.steps_worked)
        assert running >= 0.8 * ROWS_AT_A_TIME
    assert summary.completion_tokens == sum(
        new.tokens_emitted - old.tokens_emitted for old, new in zip(before, after, strict=True)
    )
    assert seen[-1].done == seen[-1].rows == 160 and seen[-1].counted
    assert seen[-1].load is not None and seen[-1].load.cap == 2 * ROWS_AT_A_TIME


def test_a_job_that_is_over_is_not_run_again_and_another_one_does_not_take_its_output(
    cluster: Cluster, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "x", **GREEDY}])
    first = batch(source, tmp_path / "out.jsonl")
    before = Path(first.output).stat().st_mtime_ns
    again = batch(source, tmp_path / "out.jsonl")
    assert again.seconds is None and again.answered == first.answered == 1
    assert Path(first.output).stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="is of a job with another seed: 0, now 1"):
        batch(source, tmp_path / "out.jsonl", seed=1)
    write(tmp_path / "in.jsonl", [{"prompt": "y", **GREEDY}, {"prompt": "z", **GREEDY}])
    with pytest.raises(ConfigError, match="is of a job with another input"):
        batch(source, tmp_path / "out.jsonl")
    assert batch(source, tmp_path / "out.jsonl", restart=True).answered == 2
    (tmp_path / "mine.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"mine.jsonl exists, and no job of ours wrote it"):
        batch(source, tmp_path / "mine.jsonl")


def test_a_job_whose_cluster_is_not_there_waits_and_then_says_so(local_ray: None, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "x"}])
    with pytest.raises(DeadlineError, match=r"cluster 'nowhere'.*no cluster named 'nowhere'"):
        Standing("nowhere", patience_s=0.1).restore()
    with pytest.raises(Exception, match="no cluster named 'nowhere'"):
        run(BatchJob(source, str(tmp_path / "out.jsonl")), Standing("nowhere"))
    assert not (tmp_path / "out.jsonl").exists()
