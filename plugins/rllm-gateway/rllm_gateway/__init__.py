"""Trains agents that talk to an OpenAI- or Anthropic-compatible endpoint, unedited."""

from __future__ import annotations

from rllm_gateway.endpoint import Endpoint
from rllm_gateway.gateway import Gateway
from rllm_gateway.workflow import GatewayConfig, GatewayWorkflow

__all__ = ["Endpoint", "Gateway", "GatewayConfig", "GatewayWorkflow"]
