#!/bin/sh
set -eu

case "${1:-}" in -h | --help)
  echo "usage: deploy/docker/roll.sh [SERVICE]    default: rollout"
  echo
  echo "Replaces the replicas one after another, while jobs run, by new ones with the current code and settings:"
  echo "each returns unfinished jobs to the queue, and the next one is stopped only when the replacement is ready."
  exit 0
esac

cd "$(dirname "$0")/../.."
service=${1:-rollout}
old=$(docker compose ps --quiet "$service")
if [ -z "$old" ]; then
  echo "roll.sh: no container of $service is running" >&2
  exit 1
fi
count=$(echo "$old" | wc -l)

docker compose build "$service"
for container in $old; do
  # Waits up to stop_grace_period.
  docker stop "$container"
  docker rm "$container"
  docker compose up --detach --wait --no-recreate --no-deps --scale "$service=$count" "$service"
done
