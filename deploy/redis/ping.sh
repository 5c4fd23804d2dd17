#!/bin/sh
# ping.sh alive: succeeds if the broker answers at all, so that a restart would not help. ping.sh ready: succeeds if clients
# may send commands, even if some get errors.
case $(redis-cli ping 2>&1) in
# Healthy; disk full, which the monitor has to report; busy with a long script.
PONG* | MISCONF* | BUSY*) exit 0 ;;
# It is loading its append-only file; a restart would start that over.
LOADING*) [ "$1" = alive ] ;;
*) exit 1 ;;
esac
