"""Plugins that harm processes that import or call them, named after what they do."""
