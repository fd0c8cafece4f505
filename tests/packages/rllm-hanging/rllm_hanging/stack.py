"""Waits for ever."""

import threading

threading.Event().wait()
