#!/bin/sh
# Build the images: images/build.sh [IMAGE…]        (base, trainer, rollout and gateway when none is named; also: ray)
#   TAG=dev  REGISTRY=tuneloop  ACCELERATOR=cpu|gpu
#   BUILDER="docker build" | "buildah build --layers" | "…/rig image"   default: the first of docker, buildah that is installed
set -eu
cd "$(dirname "$0")/.."
tag=${TAG:-dev} registry=${REGISTRY:-tuneloop} accelerator=${ACCELERATOR:-cpu}
if [ -z "${BUILDER:-}" ]; then
    if command -v docker >/dev/null; then BUILDER="docker build"
    elif command -v buildah >/dev/null; then BUILDER="buildah build --layers"
    else
        echo "error: BUILDER: '': neither docker nor buildah is on PATH; install one, or name a builder" >&2
        exit 2
    fi
fi
revision=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' components/tuneloop/__init__.py)
[ $# -gt 0 ] || set -- base trainer rollout gateway
for name in "$@"; do
    image=$registry/$name:$tag
    echo "building $image ($accelerator)" >&2
    case $BUILDER in
    *rig*image) # buildctl's words for the same
        $BUILDER "$image" images/Dockerfile . --opt build-arg:IMAGE="$name" --opt build-arg:ACCELERATOR="$accelerator" \
            --opt build-arg:VERSION="$version" --opt build-arg:REVISION="$revision" ;;
    *)
        $BUILDER --tag "$image" --file images/Dockerfile --build-arg IMAGE="$name" --build-arg ACCELERATOR="$accelerator" \
            --build-arg VERSION="$version" --build-arg REVISION="$revision" . ;;
    esac
done
