"""Paths of this machine in the settings of a run that pods carry out: pods do not see them.

`planning/limits.py: check_pod_paths` names the settings that may be paths: a new setting of that
kind has to be added there. `tests/unit/planning/test_model_references.py` tests it."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.store import local_path
from tuneloop.data.readers.opening import is_on_hub
from tuneloop.formats.adapter_files import is_path
from tuneloop.formats.stored_models import is_reference
from tuneloop.workflow.argo_pod import list_pods

REMEDY = (
    "is a path of this machine, which pods do not see: bring it into a store by "
    "`tuneloop store put DIRECTORY s3://BUCKET/NAME` and name it there, or name a path below a "
    "volume of the pods"
)
IN_IMAGE = "; a directory of the image is file:///PATH"


def list_mounted_paths(workflow: JsonMapping, source: str = "") -> list[str]:
    """List the paths at which the pods of a rendered workflow have volumes that outlive them.

    Args:
        workflow: as it is rendered.
        source: of the volumes, such as ``persistentVolumeClaim``; empty: any but ``emptyDir``.
    """
    spec = workflow["spec"]
    paths: set[str] = set()
    for template in spec.get("templates", ()):
        for pod, _ in list_pods(spec, template):
            # What is empty at a pod's start has nobody's files.
            lasting = {
                volume["name"]
                for volume in pod.get("volumes") or ()
                if (source in volume if source else "emptyDir" not in volume)
            }
            for container in pod["containers"]:
                for mount in container.get("volumeMounts") or ():
                    if mount["name"] in lasting:
                        paths.add(mount["mountPath"])
    return sorted(paths)


def check_model_path(setting: str, name: str, mounts: Sequence[str]) -> Iterator[UserError]:
    """Find a base model that is a path of this machine, and not below a volume of the pods."""
    if is_reference(name) and "://" in name:
        return
    # A directory here may have the form of a name on the hub, which pods would take it for.
    is_local = is_path(name) or Path(name).exists()
    if is_local and not is_below(name, mounts):
        yield UserError(setting, name, REMEDY + IN_IMAGE)


def check_file_path(setting: str, address: str, mounts: Sequence[str]) -> Iterator[UserError]:
    """Find a file of the data, or of a chat template, that lies on this machine.

    A path that is not here may be one of the image.
    """
    if is_on_hub(address) or local_path(address) is None:
        return
    is_relative = not address.startswith(("/", "file:"))
    is_local = is_relative or Path(address).exists()
    if is_local and not is_below(address, mounts):
        yield UserError(setting, address, REMEDY)


def is_below(path: str, mounts: Sequence[str]) -> bool:
    """Return whether an absolute path lies at or below one of several others."""
    return any(PurePosixPath(path).is_relative_to(mount) for mount in mounts)
