#!/bin/sh
# Draws what a deployment keeps secret: deploy/secrets.sh [FOLDER], where FOLDER holds a .env.example (the repository, or an
# overlay for Kubernetes). What is there already stays as it is.
#
#     FOLDER/.env                             the example, with passwords
#     FOLDER/.secrets/tokens/SCOPE/CALLER     tokens of the HTTP services (services/http/README.md)
set -eu
CDPATH='' cd -- "${1:-.}"
[ -e .env ] || [ -r .env.example ] || { echo "$PWD: no .env.example here" >&2; exit 1; }

draw() {
    drawn=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
    [ "${#drawn}" = 48 ] || { echo "/dev/urandom cannot be read" >&2; exit 1; }
    printf %s "$drawn"
}

# Only you pass .secrets; in a container, which sees what is below it, anybody may read.
umask 077
mkdir -p .secrets
chmod 700 .secrets
for caller in operate/operator rollout/client read/prometheus weights/replica; do
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
    echo "$PWD/$given: lines end with a carriage return, which would become part of what they set" >&2
    exit 1
fi
lines() {
    while IFS= read -r line || [ -n "$line" ]; do printf '%s\n' "$line"; done < "$given"
    [ -r .env.example ] || return 0
    # An .env that is older than the example.
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
