"""The renderer for Argo Workflows: a stage as a Hera template, the pod around it, the loop, lint of
what was rendered.

Nothing here runs or submits anything: `local` and `cluster` do. Argo's own fields are described in
`workflow`. A field of Argo that is rendered for the first time has to be in
`workflow/local_fields.yaml` or `tuneloop run` refuses the workflow. Whatever changes in a rendered
workflow changes `tests/golden/` and ``manifests/components/pipelines`` (``make golden`` writes
both). Kubeflow Pipelines draw the same stages by `kfp/`, with plans and pods from here.
"""
