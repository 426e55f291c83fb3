"""Plan of cells, order, resume and the run directory."""
