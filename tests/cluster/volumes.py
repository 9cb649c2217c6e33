"""Volumes where a cluster makes none itself: directories of this machine, which has to be the node then."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.conftest import kubectl

VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {name: test-CLAIM}
spec:
  capacity: {storage: 500Gi}
  accessModes: [ReadWriteMany]
  claimRef: {namespace: tuneloop, name: CLAIM}
  hostPath: {path: PATH}
"""


def apply(text: str, verb: str = "apply") -> None:
    done = subprocess.run(["kubectl", verb, "-f", "-"], input=text, text=True, capture_output=True)
    assert verb != "apply" or done.returncode == 0, done.stderr


@contextmanager
def volume(claim: str, directory: Path) -> Iterator[None]:
    """A volume for `claim`, at `directory`, if the cluster has no storage class that makes one."""
    if kubectl("get", "storageclass", "-o", "name"):
        yield
        return
    for path in (directory, *directory.parents[:2]):
        path.chmod(0o777)
    text = VOLUME.replace("CLAIM", claim).replace("PATH", str(directory))
    apply(text)
    try:
        yield
    finally:
        kubectl("-n", "tuneloop", "delete", "pvc", claim, "--wait=false", "--ignore-not-found")
        apply(text, "delete")
