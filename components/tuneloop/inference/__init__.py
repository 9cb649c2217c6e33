"""Sampling: engines, the rollout server and its loop, generation, multi-turn episodes, fleets, their conformance kit.

Here belongs what turns prompts into completions and proves which weights did it. The stages that call it are in
`stages`; what is trained is in `training`.
"""
