"""Every option, declared once: of the engine, of the server, of the engine process."""
