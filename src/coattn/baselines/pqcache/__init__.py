"""PQCache: codes of a prompt's own keys say which tokens the GPU fetches."""
