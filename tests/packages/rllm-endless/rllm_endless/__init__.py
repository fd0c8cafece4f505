"""A plugin whose import never ends. After 3 seconds of CPU time, it leaves the processor to others."""

import time

while True:
    if time.process_time() < 3.0:
        sum(range(10**6))
    else:
        time.sleep(0.05)
