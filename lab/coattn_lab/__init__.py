"""The laboratory: measurements of coattn that no user needs. Papers' figures, task suites, peers, driven benchmarks."""
