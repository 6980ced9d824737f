"""Offline profiling of a target-draft pair: which heads retrieve, and which layers and split to use."""
