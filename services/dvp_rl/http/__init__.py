"""What every HTTP service of this project has in common: who may call, how errors look, how it starts and stops."""
