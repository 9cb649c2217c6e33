"""The connection to a Kubernetes API server and the translation of its errors.

Every client of the API uses it. The objects that clients create, watch and delete belong to
`cluster`, `sharing` and `inference.fleet`.
"""
