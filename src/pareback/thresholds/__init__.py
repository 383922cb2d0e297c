"""How a goal moves thresholds: the controller and its state, the rules, the search for exact thresholds."""
