"""Planning and delivering: tasks, lanes, the global order, and the driver thread."""
