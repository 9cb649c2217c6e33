"""The connection to a Kubernetes API server, and what its errors mean: what every client of the API needs. The objects
that clients create, watch and delete belong to `cluster`, `sharing` and `inference.fleet`."""
