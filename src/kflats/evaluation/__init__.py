"""A compressed model beside its original: sizes, outputs, times."""
