"""Models on disk: transformers folders, plain torch files, and the places that models come from."""

from kflats.common.lazy import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
