"""From operations to what the compiled engine runs: layouts, tiles, memory, packed weights, tuning."""
