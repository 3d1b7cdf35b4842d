"""Tables in coded rows: written in two passes over any number of rows, read at any places."""

from kflats.common.lazy import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
