#!/bin/sh
# Starts the broker as compose and Kubernetes run it. From the environment: REDIS_PASSWORD of the user `default`, who may do
# everything; ROLLOUT_REDIS_PASSWORD and so on of the users in users.conf (one without a password is left out);
# REDIS_MAXMEMORY and REDIS_APPENDFSYNC. The configuration goes in through standard input: a command line is for everybody
# to read.
set -eu
folder=$(CDPATH='' cd -- "${0%/*}" && pwd)

users() {
    while read -r user name rules; do
        [ "$user" = user ] || continue
        eval "password=\${$(printf %s "$name" | tr a-z A-Z)_REDIS_PASSWORD:-}"
        [ -z "$password" ] || printf 'user %s >%s %s\n' "$name" "$password" "$rules"
    done < "$folder/users.conf"
}

exec redis-server - <<END
requirepass ${REDIS_PASSWORD:?}
$(users)
appendonly yes
appendfsync ${REDIS_APPENDFSYNC:-everysec}
save ""
maxmemory ${REDIS_MAXMEMORY:-512mb}
maxmemory-policy noeviction
END
