"""The pipeline: select, measure, allocate, factorize, swap, report."""
