"""InfiniGen: partial keys say one layer ahead which tokens the GPU fetches."""
