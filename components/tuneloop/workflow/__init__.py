"""Argo's manifest vocabulary: pure functions on mappings, its expressions, the settings and labels of our pods. Nothing
here renders, executes or connects: `argo`, `local` and `cluster` do."""
