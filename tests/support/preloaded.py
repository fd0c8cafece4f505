"""Imports what a command imports that trains on backend ``local``, so that its forks share it."""

# ruff: noqa: F401

from __future__ import annotations

import gc

import matplotlib.backends.backend_agg
import matplotlib.figure
import numpy as np
import rich.live
import rich.table
import rllm_local.backend
import rllm_local.kernels
import rllm_renderers.chat_template
import rllm_workflows.sort
import transformers

import rllm_core.builtin.estimators.outcome
import rllm_core.builtin.sandbox
import rllm_core.builtin.uniform
import rllm_core.cli.train
import rllm_core.hosts.inline
import rllm_core.runs.evaluation
import rllm_core.runs.starting
import rllm_viewer.closing
import rllm_viewer.diagnosis
import rllm_viewer.plot
import rllm_viewer.recordings
import rllm_viewer.results
import rllm_viewer.terminal
import rllm_viewer.warnings_of_runs

# The first call of a kernel imports the rest of numba.
rllm_local.kernels.normalise(np.ones(64, np.float32), 64, 1e-6, np.empty(64, np.float32))
gc.collect()
gc.freeze()  # collections of a fork need not look at what it has not made
