"""The renderer for Argo Workflows: a stage as a Hera template, the pod around it, the loop, lint of
what was rendered.

Nothing here runs or submits anything: `local` and `cluster` do. Argo's own fields are described in
`workflow`.
"""
