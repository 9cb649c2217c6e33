"""Publish weight versions, in full or as deltas, and assemble them byte for byte.

A version is published once, pulled by any number of replicas, and proved before they serve it. The
trainer calls `publish_version`, a replica `materialize_version`; `docs/weights.md` is the protocol
between them, which readers of other projects follow, too. Most of it is tested by
`tests/unit/weights/test_protocol.py`; after a change `make certify` and `make mutations` are run,
too (``CONTRIBUTING.md``).
"""
