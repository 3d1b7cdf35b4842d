"""The demo, and what a model is compared with there and in benchmarks."""

from kflats.demo.comparison import demo
from kflats.demo.packaged import PACKAGE, packaged_model

__all__ = ["PACKAGE", "demo", "packaged_model"]
