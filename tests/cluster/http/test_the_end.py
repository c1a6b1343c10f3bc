"""What clients see when a peer dies. It ends the cluster that the tests over HTTP share, and so comes last."""

from __future__ import annotations

import json

import openai
import pytest
import ray

from tests.cluster.http.server import COMPLETIONS, ENDLESS, GREEDY, NAME, Server, error_in, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_a_peers_death_ends_streams_with_an_error_event_and_is_503_from_then_on(server: Server) -> None:
    lines = []
    with server.stream(COMPLETIONS, ENDLESS) as response:
        assert response.status_code == 200
        for line in filter(None, response.iter_lines()):
            lines.append(line)
            if len(lines) == 3:
                ray.kill(ray.get_actor(f"{NAME}.expert-1", namespace="ray_moe"))
    assert "choices" in json.loads(lines[0].removeprefix("data: "))
    last = json.loads(lines[-1].removeprefix("data: "))
    assert list(last) == ["error"]
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "peer_lost")

    answer = server.post(COMPLETIONS, GREEDY)
    assert answer.status_code == 503
    assert error_in(answer)["code"] == "peer_lost"
    # Readiness is the controller's word, and that looks at its peers a few times a second.
    wait_until(lambda: server.ready().status_code == 503)
    assert error_in(server.ready())["code"] == "peer_lost"
    assert server.get("/health").status_code == 200
    with pytest.raises(openai.InternalServerError) as caught:
        server.openai.completions.create(**GREEDY)
    assert caught.value.code == "peer_lost"
