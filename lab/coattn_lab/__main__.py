"""`python -m coattn_lab`."""

from coattn_lab.cli.main import main

main()
