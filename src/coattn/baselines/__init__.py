"""Published methods to compare with, a file or folder each; they register their parts like anybody's."""
