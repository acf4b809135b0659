"""Local rank processes: started, watched and killed as a unit."""
