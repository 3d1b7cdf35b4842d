"""kflats: cover weight matrices with flats; a smaller, ordinary PyTorch / Hugging Face model comes back.

>>> import kflats
>>> kflats.Recipe(kflats.Flats(k=5), kflats.TokenCounts(power=0.5)).method.k
5
"""

from kflats.common.lazy import from_stub
from kflats.io.plugin import register_plugin

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)

register_plugin()
