"""The rollout service: one replica in front of an engine. It serves HTTP, and the job queue if there is a broker."""
