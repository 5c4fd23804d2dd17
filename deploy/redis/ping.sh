#!/bin/sh
# ping.sh alive: whether the broker answers at all, so that a restart would mend nothing. ping.sh ready: whether clients may
# ask it. An error is an answer, too.
case $(redis-cli ping 2>&1) in
# All is well; its disk is full, and the monitor has to tell; a script takes long.
PONG* | MISCONF* | BUSY*) exit 0 ;;
# It reads its append-only file, and would begin anew.
LOADING*) [ "$1" = alive ] ;;
*) exit 1 ;;
esac
