"""What a rendered workflow will need, before it is launched: pods, memory, time, how many iterations a pod should have.

Everything is read from the workflow and, where there is one, from a run before it. Nothing is launched here.
"""
