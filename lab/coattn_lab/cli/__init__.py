"""The command `coattn-lab`."""
