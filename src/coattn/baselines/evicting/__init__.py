"""What H2O and TOVA share: entries with weights, of which the least are dropped for good."""
