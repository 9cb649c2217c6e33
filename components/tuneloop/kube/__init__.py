"""The connection to a Kubernetes API server and the translation of its errors, for every client of the API. The objects
that clients create, watch and delete belong to `cluster`, `sharing` and `inference.fleet`."""
