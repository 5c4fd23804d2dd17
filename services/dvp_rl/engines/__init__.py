"""One protocol, several engines. Import each engine from its own module; `fake` needs no torch."""
