"""The renderer for Argo Workflows: a stage as a Hera template, the pod around it, the loop, lint of what was rendered.

Nothing here runs or submits anything: `local` and `cluster` do. What Argo itself means by a field is `workflow`."""
