"""What a rendered workflow will need: pods, memory, time, how many iterations a pod should have. Everything is read
from the workflow and, where there is one, from a run before it; nothing is launched here."""
