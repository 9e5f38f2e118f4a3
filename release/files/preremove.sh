#!/bin/sh
set -e
# Not in an upgrade: deb passes "upgrade", rpm the number of packages that stay.
case ${1:-} in
remove | 0)
	if [ -d /run/systemd/system ]; then
		systemctl disable --now ckptstore.service
	fi
	;;
esac
