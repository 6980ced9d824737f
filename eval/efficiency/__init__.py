"""How fast Dustin is: kernels against their floors and baselines, and whole steps, each run with its conditions."""
