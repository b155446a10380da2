"""Methods as data: rows that name one part on each axis, the table of them, and the registry of parts."""
