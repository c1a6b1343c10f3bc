#!/usr/bin/env bash
# Submit a batch to a Ray cluster whose nodes have this package, and wait for it. What is done survives whatever happens:
# submit it again with the same arguments, and it goes on.
#   RAY_API_SERVER_ADDRESS=http://HEAD:8265 cluster_configs/jobs/batch.sh IN OUT --model MODEL --peers 4     a cluster of its own
#   RAY_API_SERVER_ADDRESS=http://HEAD:8265 cluster_configs/jobs/batch.sh IN OUT                             the one that runs
# IN and OUT are paths that the head node sees, or URIs.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
exec ray job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" \
    --runtime-env "$here/runtime-env.yaml" -- ray-moe batch "$@"
