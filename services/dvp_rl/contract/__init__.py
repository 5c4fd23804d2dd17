"""Data that crosses process boundaries. Imports without torch, redis or fastapi."""
