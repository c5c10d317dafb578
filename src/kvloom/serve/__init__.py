"""The real world, put together: processes, sockets, signals."""
