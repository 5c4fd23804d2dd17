#!/bin/sh
set -eu

usage() {
  echo "usage: deploy/docker/backup.sh save FOLDER      while all of it runs, or the broker alone"
  echo "       deploy/docker/backup.sh restore FOLDER   where nothing has run yet; then docker compose up -d"
  echo
  echo "FOLDER gets the queue (queue.rdb), the volumes (runs.tar, weights.tar), .env and .secrets: keep it from others."
}

fail() {
  echo "backup.sh: $*" >&2
  exit 1
}

# in_volume NAME SCRIPT: in a container of the trainer that has it under /NAME.
in_volume() {
  docker compose run --rm --no-deps -T --entrypoint sh trainer -euc "cd /$1; $2"
}

# in_queue SCRIPT: in a container of the broker, in its folder.
in_queue() {
  docker compose run --rm --no-deps -T --entrypoint sh redis -euc "cd /data; $1"
}

save() {
  [ ! -e "$folder" ] || fail "$folder is there already"
  umask 077
  rm -rf "$folder.partial"
  mkdir -p "$folder.partial"
  cp -Rp .env .secrets "$folder.partial"
  # Before the checkpoints: a group that one covers already is known; one that is missing would be drawn again.
  # Into a file: what redis-cli writes to a pipe ends with a mark of the transfer.
  docker compose exec -T redis sh -euc '
    trap "rm -f backup.rdb" EXIT
    redis-cli --rdb backup.rdb >&2
    cat backup.rdb' > "$folder.partial/queue.rdb"
  for volume in runs weights; do
    # Names of the files first, which takes no time, so that none is removed later; what is in them stays, or grows. A file
    # that is removed meanwhile ends the attempt. tar ends with 1 if a file has grown, or has lost its other name.
    in_volume $volume '
      trap "rm -rf .backup" EXIT
      names() { rm -rf .backup && mkdir .backup && find . -mindepth 1 -maxdepth 1 ! -name .backup -exec cp -al -t .backup {} +; }
      names 2> /dev/null || names 2> /dev/null || names
      tar -C .backup --warning=no-file-changed -c . || [ $? = 1 ]' > "$folder.partial/$volume.tar"
  done
  mv "$folder.partial" "$folder"
}

restore() {
  for name in .env .secrets queue.rdb runs.tar weights.tar; do
    [ -r "$folder/$name" ] || fail "$folder/$name cannot be read: not a folder that save has made"
  done
  for name in .env .secrets; do
    [ -e $name ] || cp -Rp "$folder/$name" .
  done
  [ -z "$(docker compose ps --all --quiet)" ] || fail "there are containers; docker compose down removes them"
  empty='[ -z "$(ls -A)" ] || { echo "backup.sh: the volume of $PWD is not empty; docker compose down --volumes empties all" >&2; exit 1; }'
  in_queue "$empty"
  for volume in runs weights; do in_volume $volume "$empty"; done
  for volume in runs weights; do in_volume $volume 'tar -x' < "$folder/$volume.tar"; done
  # deploy/redis/start.sh reads it.
  in_queue 'cat > partial; mv partial restore.rdb' < "$folder/queue.rdb"
}

case "${1:-}" in -h | --help)
  usage
  exit 0
esac
[ $# = 2 ] || { usage >&2; exit 2; }
case $2 in /*) folder=$2 ;; *) folder=$PWD/$2 ;; esac
cd "$(dirname "$0")/../.."
case $1 in
save) save ;;
restore) restore ;;
*) usage >&2; exit 2 ;;
esac
