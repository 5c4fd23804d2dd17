"""Weight versions for the replicas: published as folders, announced, and sent over process groups."""
