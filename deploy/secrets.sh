#!/bin/sh
# Generates the secrets of a deployment. Existing ones stay as they are.
#
# deploy/secrets.sh [FOLDER]                  for docker compose; FOLDER holds a .env.example, as the repository does
#     FOLDER/.env                             the example, with passwords
#     FOLDER/.secrets/tokens/SCOPE/CALLER     tokens of the HTTP services (services/dvp_rl/http/README.md)
#
# deploy/secrets.sh --kubernetes NAMESPACE | kubectl create -f -
#     the namespace, a secret `redis` with passwords, a secret tokens-SCOPE for each scope
set -eu
folder=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
callers="operate/operator harness/harness rollout/client read/prometheus weights/replica"

draw() {
    drawn=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
    [ "${#drawn}" = 48 ] || { echo "/dev/urandom cannot be read" >&2; exit 1; }
    printf %s "$drawn"
}

secret() {
    echo "---"
    echo "apiVersion: v1"
    echo "kind: Secret"
    echo "metadata: {name: $1, namespace: \"$namespace\"}"
    echo "stringData:"
}

manifests() {
    echo "apiVersion: v1"
    echo "kind: Namespace"
    echo "metadata: {name: \"$namespace\", labels: {pod-security.kubernetes.io/enforce: restricted}}"
    secret redis
    echo "  SCALER_REDIS_USER: scaler"
    users=$(sed -n 's/^user \([a-z]*\) .*/\1_/p' "$folder/redis/users.conf") || exit
    for user in '' $(echo "$users" | tr a-z A-Z); do
        drawn=$(draw) || exit
        echo "  ${user}REDIS_PASSWORD: \"$drawn\""
    done
    for caller in $callers; do
        secret "tokens-${caller%/*}"
        drawn=$(draw) || exit
        echo "  ${caller#*/}: \"$drawn\""
    done
}

if [ "${1-}" = --kubernetes ]; then
    namespace=${2-}
    [ -n "$namespace" ] || { echo "secrets.sh: --kubernetes needs a namespace" >&2; exit 1; }
    manifests=$(manifests) || exit  # all of them or none
    echo "$manifests"
    exit
fi

CDPATH='' cd -- "${1:-.}"
[ -e .env ] || [ -r .env.example ] || { echo "$PWD: no .env.example here" >&2; exit 1; }

# Only you can enter .secrets; in a container, which sees only folders below it, any user may read them.
umask 077
mkdir -p .secrets
chmod 700 .secrets
for caller in $callers; do
    [ -s ".secrets/tokens/$caller" ] && continue
    (
        umask 022
        mkdir -p ".secrets/tokens/${caller%/*}"
        draw > .secrets/partial
        mv .secrets/partial ".secrets/tokens/$caller"
    )
    echo "drew .secrets/tokens/$caller"
done
given=.env
[ -e .env ] || given=.env.example
if grep -q "$(printf '\r')" "$given"; then
    echo "$PWD/$given: lines end with a carriage return, which would become part of the values" >&2
    exit 1
fi
lines() {
    while IFS= read -r line || [ -n "$line" ]; do printf '%s\n' "$line"; done < "$given"
    [ -r .env.example ] || return 0
    # Passwords that an .env older than the example lacks.
    while IFS= read -r line; do
        case $line in
        [A-Z]*_PASSWORD=) grep -Eq "^[[:space:]]*(export[[:space:]]+)?${line%=}[[:space:]]*=" "$given" || echo "$line" ;;
        esac
    done < .env.example
}
if [ "$given" = .env.example ] || lines | grep -q '^[A-Z].*_PASSWORD=$'; then
    lines | while IFS= read -r line; do
        case $line in
        [A-Z]*_PASSWORD=)
            password=$(draw)
            printf '%s%s\n' "$line" "$password"
            ;;
        *) printf '%s\n' "$line" ;;
        esac
    done > .env.partial
    mv .env.partial .env
    echo "wrote passwords into .env"
fi
