"""Weight versions: published once, full or as a delta; pulled by any number of replicas; proved before they serve.

The trainer calls `publish_version`, a replica `materialize_version`; `docs/weights.md` is the protocol between them."""
