"""`python -m coattn`."""

from coattn.cli.main import main

main()
