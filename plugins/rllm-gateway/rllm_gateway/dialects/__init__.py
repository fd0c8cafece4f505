"""The API dialects of agents: each reads a request into a `ClientCall`, and writes answers in its own format."""
