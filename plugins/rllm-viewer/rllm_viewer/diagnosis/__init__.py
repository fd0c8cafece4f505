"""Diagnoses what goes wrong in a run, with the same rules while it runs and later from its folder."""

from rllm_viewer.diagnosis.findings import Diagnosis, Finding
from rllm_viewer.diagnosis.run_folders import of_folder

__all__ = ["Diagnosis", "Finding", "of_folder"]
