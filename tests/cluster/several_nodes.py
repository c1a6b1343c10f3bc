"""A program: one cluster over two raylets of this machine, its result as JSON on stdout.

Ray's own multi-node test cluster; it cannot share a process with another Ray, so a test starts this as a process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

import ray
from ray.cluster_utils import Cluster as Raylets

from ray_moe import cluster, sdk
from ray_moe.config import ClusterConfig
from ray_moe.engine.sampling import SamplingParams

# A node has room for two peers and no more, so that Ray itself must spread them.
CPUS_OF_A_NODE, CPUS_OF_A_PEER = 1, 0.5


async def generate(directory: object, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    client = sdk.Client(directory)  # type: ignore[arg-type]
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return [list(made.token_ids) for made in await asyncio.gather(*(client.generate(p, greedy) for p in prompts))]


def main() -> None:
    prompts, tokens = json.loads(sys.argv[1]), int(sys.argv[2])
    raylets = Raylets(initialize_head=True, head_node_args={"num_cpus": CPUS_OF_A_NODE, "include_dashboard": False})
    try:
        raylets.add_node(num_cpus=CPUS_OF_A_NODE)
        ray.init(address=raylets.address, namespace="ray_moe", log_to_driver=False)
        config = ClusterConfig(
            name="nodes",
            model="tiny-moe",
            peers=4,
            cpus_per_peer=CPUS_OF_A_PEER,
            transport="hierarchical",
            audit_rate=1,
        )
        moe = cluster.start(config)
        found = asyncio.run(generate(moe.directory(), prompts, tokens))
        status, placement = moe.status(), moe.placement()
        moe.stop()
        domains = {
            domain.domain_id: [rank.value for rank in domain.member_ranks] for domain in placement.topology.domains
        }
        answer = {"tokens": found, "domains": domains, "peers": [asdict(peer) for peer in status.peers]}
        sys.stdout.write(json.dumps(answer) + "\n")
    finally:
        ray.shutdown()
        raylets.shutdown()


if __name__ == "__main__":
    main()
