"""What keeps a run alive on a machine: processes, memory, files, several ranks."""
