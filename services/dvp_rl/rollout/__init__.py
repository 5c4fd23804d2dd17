"""The rollout service: one replica in front of an engine. HTTP always, the job queue when there is a broker."""
