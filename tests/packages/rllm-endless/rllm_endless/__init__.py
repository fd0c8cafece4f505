"""A plugin whose import never ends."""

while True:
    pass
