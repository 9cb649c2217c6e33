"""Types of parsed JSON and YAML objects, such as Kubernetes manifests, messages and settings."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""An object whose owner may change it."""
JsonMapping = Mapping[str, Any]
"""An object that is only read."""
