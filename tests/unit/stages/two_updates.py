"""Two updates, each with its state written beside what follows: ``python -m tests.unit.stages.two_updates BASE``."""

import sys

from tests.unit.stages.test_replay import ROUNDED, loop
from tuneloop.core.artifacts import Artifact
from tuneloop.core.threads import BACKGROUND

if __name__ == "__main__":
    BACKGROUND.is_concurrent = True
    loop("s3://bucket/run", Artifact(sys.argv[1]), 2, **ROUNDED)
