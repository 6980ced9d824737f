"""Books: perplexity under sparse verification, and how long outputs drift from the full cache."""
