"""The API dialects of agents: each reads a request into a `Call`, and writes answers in its own format."""
