"""Trade-off curves: a store of runs, the grid of a curve, and the workers that run it on one machine or many."""
