"""The toy as a pipeline file: its stages live in a module that a pod can import."""

from tests.unit.toy import Config, build_argo

__all__ = ["Config", "build_argo"]
