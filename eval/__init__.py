"""Evaluation of Dustin: quality and speed of every method through one engine."""
