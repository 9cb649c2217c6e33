"""Sessions: a policy and its optimizer that a worker keeps resident, driven through Tinker's
primitives.

A gateway (`app`) creates, lists, watches and ends sessions and passes requests on to their workers
(`worker`). It keeps no state: a session is a Job of Kubernetes (`jobs`), or a child process on one
machine (`processes`). Workers speak the wire format of the ``tinker`` client library, release 0.38,
as read from the installed package (Apache-2.0). The package is optional: only its command imports
it. An identifier begins with the session's, which begins with its namespace::

    team-a.session-3f9c0d21ab                session
    team-a.session-3f9c0d21ab:train:0        model, the first one of the session
    team-a.session-3f9c0d21ab:sample:2       sampling session
    team-a.session-3f9c0d21ab:train:0:7      request, the seventh to that model

What another release of the client may need: its messages in `tinker.textproto` (numbers of fields)
and `messages.py` (names), its routes and its configuration in `app.py` (`PROXIED`,
`CLIENT_CONFIG`).
"""

from tuneloop.core.hooks import Extension

EXTENSION = Extension(
    name="gateway", commands={"gateway": "tuneloop.extensions.gateway.command:serve_gateway"}
)
