"""The interfaces that agents speak: each reads a request into a `Call`, and writes answers in its own form."""
