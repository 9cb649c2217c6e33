#!/bin/sh
# Resolve every extra as `pip install 'tuneloop[EXTRA]'` would, from the package index alone, for every Python offered.
# Usage: requirements/resolve.sh [PATH_OF_UV]
set -eu
uv=$(command -v "${1:-uv}")
cd "$(dirname "$0")/.."
extras=$(sed -n '/^\[project.optional-dependencies\]/,/^$/s/^\([a-z-]*\) = .*/\1/p' pyproject.toml)
failed=0
for python in 3.11 3.12 3.13; do
    for extra in $extras; do
        # --no-config: without the overrides of pyproject.toml, which pip and other projects know nothing of.
        if told=$("$uv" pip compile pyproject.toml --extra "$extra" --no-config --quiet --python-version $python \
            --python-platform x86_64-manylinux_2_28 2>&1); then
            echo "$python $extra: $(echo "$told" | grep -c ==) packages"
        else
            echo "$python $extra: cannot be resolved: $told" >&2
            failed=1
        fi
    done
done
exit $failed
