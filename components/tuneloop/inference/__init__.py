"""Sampling: engines, the rollout server and its loop, generation, multi-turn episodes, fleets, their conformance kit.
All that turns prompts into completions and proves which weights made them; the stages that call it are in `stages`."""
