#!/bin/sh
# Starts the broker for compose and Kubernetes. Environment: REDIS_PASSWORD of the user `default`, who may do everything;
# ROLLOUT_REDIS_PASSWORD and so on of the users in users.conf (a user without a password is left out); REDIS_MAXMEMORY and
# REDIS_APPENDFSYNC. The configuration is passed through standard input, because everybody can read a command line.
set -eu
folder=$(CDPATH='' cd -- "${0%/*}" && pwd)

# Values must not break the configuration line that they become words of.
check() {
    case $2 in
    '' | *[!A-Za-z0-9._~-]*)
        echo "start.sh: $1 must consist of letters, digits and . _ ~ - and not be empty" >&2
        exit 1
        ;;
    esac
}

users() {
    while read -r user name rules; do
        [ "$user" = user ] || continue
        variable=$(printf %s "${name}_REDIS_PASSWORD" | tr a-z A-Z)
        eval "password=\${$variable-}"
        [ -n "$password" ] || continue
        check "$variable" "$password"
        printf 'user %s >%s %s\n' "$name" "$password" "$rules"
    done < "$folder/users.conf"
}

check REDIS_PASSWORD "${REDIS_PASSWORD-}"
users=$(users)

# A backup (redis-cli --rdb) becomes the base of the append-only file; otherwise the server would not read it.
base=appendonly.aof.1.base.rdb
if [ -e restore.rdb ] || [ -e restoring/$base ]; then
    if [ -e appendonlydir ]; then
        echo "start.sh: $PWD holds both restore.rdb and a queue (appendonlydir): remove one of them" >&2
        exit 1
    fi
    mkdir -p restoring
    echo "file $base seq 1 type b" > restoring/appendonly.aof.manifest
    [ ! -e restore.rdb ] || mv restore.rdb restoring/$base
    mv restoring appendonlydir
fi
exec redis-server - <<END
requirepass $REDIS_PASSWORD
$users
appendonly yes
appendfsync ${REDIS_APPENDFSYNC:-everysec}
save ""
maxmemory ${REDIS_MAXMEMORY:-512mb}
maxmemory-policy noeviction
END
