#!/bin/sh
set -eu

usage() {
  echo "usage: deploy/docker/backup.sh save FOLDER      while the system runs, or at least the broker"
  echo "       deploy/docker/backup.sh restore FOLDER   where nothing has run yet; then docker compose up -d"
  echo
  echo "FOLDER gets the queue (queue.rdb), the volumes (runs.tar, weights.tar), .env and .secrets: keep it private."
}

fail() {
  echo "backup.sh: $*" >&2
  exit 1
}

# in_volume NAME SCRIPT: runs SCRIPT in a container of the trainer, in the volume's folder /NAME.
in_volume() {
  docker compose run --rm --no-deps -T --entrypoint sh trainer -euc "cd /$1; $2"
}

# in_queue SCRIPT: runs SCRIPT in a container of the broker, in its data folder.
in_queue() {
  docker compose run --rm --no-deps -T --entrypoint sh redis -euc "cd /data; $1"
}

save() {
  [ ! -e "$folder" ] || fail "$folder already exists"
  umask 077
  rm -rf "$folder.partial"
  mkdir -p "$folder.partial"
  cp -Rp .env .secrets "$folder.partial"
  # The queue goes before the checkpoints: the trainer recognises groups that a newer checkpoint covers, but groups that
  # are missing would be generated again. It goes through a file: redis-cli appends a transfer marker on a pipe.
  docker compose exec -T redis sh -euc '
    trap "rm -f backup.rdb" EXIT
    redis-cli --rdb backup.rdb >&2
    cat backup.rdb' > "$folder.partial/queue.rdb"
  for volume in runs weights; do
    # Hard links first, which takes no time: afterwards no file can disappear, and its contents stay or grow. A file that
    # is removed during the linking fails the attempt. tar exits with 1 if a file has grown or lost its other link.
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
    [ -r "$folder/$name" ] || fail "$folder/$name cannot be read: not a folder made by save"
  done
  for name in .env .secrets; do
    [ -e $name ] || cp -Rp "$folder/$name" .
  done
  [ -z "$(docker compose ps --all --quiet)" ] || fail "there are containers; docker compose down removes them"
  empty='[ -z "$(ls -A)" ] || { echo "backup.sh: the volume of $PWD is not empty; docker compose down --volumes empties all" >&2; exit 1; }'
  in_queue "$empty"
  for volume in runs weights; do in_volume $volume "$empty"; done
  for volume in runs weights; do in_volume $volume 'tar -x' < "$folder/$volume.tar"; done
  # deploy/redis/start.sh loads it.
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
