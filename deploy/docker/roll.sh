#!/bin/sh
set -eu

case "${1:-}" in -h | --help)
  echo "usage: deploy/docker/roll.sh [SERVICE]    default: rollout"
  echo
  echo "Replaces the replicas by new ones, of the code and settings as they are now, one after another, while jobs run:"
  echo "each gives back what it cannot finish, and the next one goes when its successor is ready."
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
  # Waits for stop_grace_period.
  docker stop "$container"
  docker rm "$container"
  docker compose up --detach --wait --no-recreate --scale "$service=$count" "$service"
done
