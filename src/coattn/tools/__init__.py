"""What a user runs on an own machine besides the engine: benchmarks, evaluations."""
