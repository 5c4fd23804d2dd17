#!/bin/sh
# Draws what a deployment keeps secret: deploy/secrets.sh [FOLDER], where FOLDER holds a .env.example (the repository, or an
# overlay for Kubernetes). What is there already stays as it is.
#
#     FOLDER/.env                             the example, with passwords
#     FOLDER/.secrets/tokens/SCOPE/CALLER     tokens of the HTTP services (services/http/README.md)
set -eu
cd "${1:-.}"

draw() {
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n'
}

# Only you pass .secrets; in a container, which sees what is below it, anybody may read.
umask 077
mkdir -p .secrets
for caller in operate/operator rollout/client read/prometheus weights/replica; do
    if ! [ -e ".secrets/tokens/$caller" ]; then
        (
            umask 022
            mkdir -p ".secrets/tokens/${caller%/*}"
            draw > .secrets/partial
            mv .secrets/partial ".secrets/tokens/$caller"
        )
        echo "drew .secrets/tokens/$caller"
    fi
done
if ! [ -e .env ]; then
    while IFS= read -r line; do
        case $line in
        *_PASSWORD=) printf '%s%s\n' "$line" "$(draw)" ;;
        *) printf '%s\n' "$line" ;;
        esac
    done < .env.example > .env.partial
    mv .env.partial .env
    echo "wrote .env"
fi
