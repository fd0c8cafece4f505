"""Waits forever."""

import threading

threading.Event().wait()
