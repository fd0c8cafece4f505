"""From a run file to the parts of a run.

Every function raises a `rllm_core.errors.ConfigError` for a setting that is wrong or cannot be honored, and a
`rllm_core.errors.PluginError` for a provider that is missing or broken. Both are one line that says what to do.
"""
