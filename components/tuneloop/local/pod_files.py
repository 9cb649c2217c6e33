"""A pod's private corner of the file system.

On a cluster every pod has its own ``/tmp/tuneloop/outputs``; here they share one machine. So each path that a template
declares (an output parameter's, an emptyDir's) is mapped below the node's directory, by rewriting it
wherever it appears in the command, the arguments and the environment. A directory that holds
declared outputs is mapped where it is a whole value, as in ``TUNELOOP_OUTPUTS=/tmp/tuneloop/outputs``.
``/tmp`` and ``/dev/shm`` as emptyDirs are the machine's own.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

SHARED = ("/tmp", "/dev/shm")


class PodFilesystem:
    """The files of one pod, below `root` (emptied first)."""

    def __init__(self, root: Path, template: Mapping[str, Any]) -> None:
        self.root = root
        self._template = template
        declared = [source["path"] for source in _sources(template).values()]
        self._paths = sorted({*declared, *_empty_dirs(template)}, key=len, reverse=True)
        self._parents = {str(PurePosixPath(path).parent) for path in declared} - {"/", *SHARED}
        shutil.rmtree(root, ignore_errors=True)
        for path in self._paths:
            self.local_path(path).parent.mkdir(parents=True, exist_ok=True)
        for path in _empty_dirs(template):
            self.local_path(path).mkdir(parents=True, exist_ok=True)
        root.mkdir(parents=True, exist_ok=True)

    def local_path(self, path: str) -> Path:
        """Return where `path` of the container is on this machine."""
        return self.root / "fs" / path.lstrip("/")

    def translate(self, text: str) -> str:
        """Replace the declared paths in `text` by their places on this machine."""
        head, equals, tail = text.rpartition("=")
        if tail.rstrip("/") in self._parents:
            return f"{head}{equals}{self.local_path(tail)}"
        if not self._paths:
            return text
        pattern = "|".join(map(re.escape, self._paths))
        return re.sub(rf"(?<![\w./-])(?:{pattern})(?![\w-])", lambda match: str(self.local_path(match[0])), text)

    def read_parameters(self) -> tuple[dict[str, str], list[str]]:
        """Return the output parameters that the pod wrote or that have a default, and the names of the missing ones."""
        values, missing = {}, []
        for name, source in _sources(self._template).items():
            file = self.local_path(source["path"])
            if file.exists():
                values[name] = file.read_text().removesuffix("\n")
            elif "default" in source:
                values[name] = str(source["default"])
            else:
                missing.append(name)
        return values, missing


def _sources(template: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return where the output parameters of a template come from that the pod writes to a file."""
    parameters = template.get("outputs", {}).get("parameters", [])
    return {p["name"]: p["valueFrom"] for p in parameters if "path" in p.get("valueFrom", {})}


def _empty_dirs(template: Mapping[str, Any]) -> list[str]:
    container = template.get("container") or {}
    mounts = [mount["mountPath"].rstrip("/") for mount in container.get("volumeMounts", [])]
    return [path for path in mounts if path not in SHARED]
