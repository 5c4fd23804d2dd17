"""What crosses a process boundary. Imports without torch, redis or fastapi."""
