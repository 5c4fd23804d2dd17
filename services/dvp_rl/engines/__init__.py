"""One protocol, several engines. Import an engine's module by name: only `transformers` needs torch."""
