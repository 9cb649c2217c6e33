"""Trainers as jobs of other operators: TrainJob, JobSet, RayJob, Job, a step of a KFP pipeline."""

from tuneloop.core.hooks import Extension

EXTENSION = Extension(name="trainers")
