"""Weight versions for the replicas: published as folders, announced, sent over process groups."""
