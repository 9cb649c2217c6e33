"""Sampling: all that turns prompts into completions and proves which weights made them.

Here are engines, the rollout server and its loop, generation, episodes of several turns, fleets,
and their conformance kit. The stages that call them are in `tuneloop.stages`.
"""
