"""Where tasks run, one executor a file. A runner knows nothing of samples."""
