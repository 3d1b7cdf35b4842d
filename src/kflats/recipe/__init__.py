"""Requests and decisions as values: a recipe for one weight, a plan for all weights, a budget for both."""
