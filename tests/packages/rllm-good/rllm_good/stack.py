"""What the records point at."""


class GoodBackend:
    pass


class PlainParser:
    pass


class Echo:
    pass
