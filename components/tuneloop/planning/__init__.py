"""What a rendered workflow will need: pods, memory, disk, time, and the limits that it would break.

Everything is read from the workflow and, where there is one, from a run before it. Nothing is
launched here.
"""
