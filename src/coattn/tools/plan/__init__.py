"""What runs where, before anything is loaded: arithmetic over a config.json and a card. Imports no PyTorch."""
