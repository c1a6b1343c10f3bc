#!/usr/bin/env bash
# tests.sh MARKS [PYTEST ARGUMENTS]: the tests that MARKS select. What takes one process a test runs on all cores first;
# what starts clusters, real servers or several peers comes after, one test at a time. Named paths run as they are named.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marks=$1
shift
python=.venv/bin/python
side_by_side=(tests/unit tests/conformance tests/kernels)
nothing_collected=5

for argument in "$@"; do
    if [ -e "${argument%%::*}" ]; then
        exec "$python" -m pytest -m "$marks" "$@"
    fi
done

"$python" -m pytest -m "$marks" -n auto --maxprocesses=8 --dist loadfile "${side_by_side[@]}" "$@"
first=$?
"$python" -m pytest -m "$marks" "${side_by_side[@]/#/--ignore=}" tests "$@"
second=$?

# A selection (-k) may well lie in one of the two.
[ $first -ne $nothing_collected ] || first=$second
[ $second -ne $nothing_collected ] || second=$first
exit $((first != 0 ? first : second))
