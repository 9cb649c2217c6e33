#!/bin/sh
# Build the images: images/build.sh [IMAGE…]        (base, trainer, rollout and gateway when none is named; also: ray, torchtune)
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
        set -- --opt build-arg:IMAGE="$name" --opt build-arg:ACCELERATOR="$accelerator"
        # The rig's build cache ends with the rig. The node's images stay: the libraries are one of them, named by what they are made of.
        made_of=$(cat images/Dockerfile requirements/*.txt | sha256sum | cut -c1-12)
        libraries=docker.io/$registry/$name-libraries:$accelerator-$made_of
        case $(kubectl get nodes --output 'jsonpath={.items[*].status.images[*].names}') in
        *"$libraries"*) ;;
        *) $BUILDER "$libraries" images/Dockerfile . --opt target="$name-libraries" "$@" ;;
        esac
        $BUILDER "$image" images/Dockerfile . --opt context:"$name-libraries=docker-image://$libraries" "$@" \
            --opt build-arg:VERSION="$version" --opt build-arg:REVISION="$revision" ;;
    *)
        $BUILDER --tag "$image" --file images/Dockerfile --build-arg IMAGE="$name" --build-arg ACCELERATOR="$accelerator" \
            --build-arg VERSION="$version" --build-arg REVISION="$revision" . ;;
    esac
done
