"""Plugins that harm whoever imports or asks them, each in its own way. Their names say how."""
