#!/bin/sh
set -e
# The user and the stores stay: their bytes are not the package's.
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
fi
