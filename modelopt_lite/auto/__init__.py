"""AutoQuantize: search which format each group of matrices gets, for a number of bits a weight."""
