"""The interfaces that agents speak. Each reads a request into a `Call`, and writes answers as its clients expect them."""
