"""Users' functions in processes of their own: process.py is the side of the program, child.py that of the function."""
