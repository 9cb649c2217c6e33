"""The connection to a Kubernetes API server, and what its errors mean.

Here belongs what every client of the API needs, whatever it creates. What is created, watched or deleted belongs to
`cluster`, `sharing` or `inference.fleet`.
"""
